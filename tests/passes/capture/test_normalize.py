"""Unpacking nn.MultiheadAttention, and keeping torch's fused encoder paths from going around linears."""

import contextlib
import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

from acm_compiler.errors import UsageError
from acm_compiler.passes.capture.normalize import (
    disable_fast_path,
    normalize,
    normalized,
    restore_fast_path,
)
from acm_compiler.passes.capture.unpacked_attention import UnpackedAttention, unpack_attention

B, T, S, E, H = 3, 5, 7, 16, 4


def packed(**options) -> nn.MultiheadAttention:
    """An attention in float64 whose biases are not zero, so that dropping one would show."""
    attention = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention


def mask_of(kind: str | None, keys: int) -> Tensor | None:
    if kind == "bool":
        mask = torch.rand(T, keys) > 0.7
        mask[:, 0] = False
        return mask
    if kind == "float":
        return torch.randn(T, keys, dtype=torch.float64)
    return torch.randn(B * H, T, keys, dtype=torch.float64) if kind == "per_head" else None


def padding_of(kind: str | None, keys: int) -> Tensor | None:
    if kind is None:
        return None
    padding = torch.arange(keys) >= torch.tensor([[keys], [keys - 1], [keys - 3]])
    return padding if kind == "bool" else padding.double() * -4.0


def results_and_gradients(attention: nn.Module, inputs: list[Tensor], options: dict) -> tuple[list, dict]:
    """Results for the inputs, then the gradients that a fixed random loss leaves in inputs, and in parameters."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    y, weights = attention(*(inputs if len(inputs) == 3 else inputs * 3), **options)
    results = [r for r in (y, weights) if r is not None]
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results]
    names, parameters = zip(*attention.named_parameters(), strict=True)
    loss = sum((r * d).sum() for r, d in zip(results, draws, strict=True))
    # not backward(): both attentions hold the same out_proj
    gradients = torch.autograd.grad(loss, [*inputs, *parameters])
    return [*results, *gradients[: len(inputs)]], dict(zip(names, gradients[len(inputs) :], strict=True))


def assert_same_gradients(old: dict, new: dict, attention: nn.MultiheadAttention) -> None:
    parts = [new[f"{name}_proj.weight"] for name in "qkv"]
    if attention._qkv_same_embed_dim:
        torch.testing.assert_close(torch.cat(parts), old["in_proj_weight"])
    else:
        for name, part in zip("qkv", parts, strict=True):
            torch.testing.assert_close(part, old[f"{name}_proj_weight"])
    if attention.in_proj_bias is not None:
        biases = [new[f"{name}_proj.bias"] for name in "qkv"]
        torch.testing.assert_close(torch.cat(biases), old["in_proj_bias"])
    for name in ("out_proj.weight", "out_proj.bias", "bias_k", "bias_v"):
        if old.get(name) is not None:
            torch.testing.assert_close(new[name], old[name])


def assert_equivalent(attention: nn.MultiheadAttention, inputs: list[Tensor], **options) -> None:
    unpacked = unpack_attention(attention)
    wanted, old = results_and_gradients(attention, inputs, options)
    got, new = results_and_gradients(unpacked, inputs, options)
    torch.testing.assert_close(got, wanted)
    assert_same_gradients(old, new, attention)


# batch first or not; query, key and value: one tensor, two, or three of different widths
LAYOUTS = list(itertools.product([True, False], [(E,), (E, E, E), (E, 6, 10)]))
# torch deprecates a float mask beside a boolean one
MASKS = [(None, None), (None, "bool"), (None, "float"), ("bool", None), ("bool", "bool"), ("float", None)]
MASKS += [("float", "float"), ("per_head", None), ("per_head", "float")]


@pytest.mark.parametrize(("mask", "padding"), MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_values_and_gradients_equal_the_packed_ones_for_every_mask_and_layout(mask, padding, need_weights):
    for batch_first, dims in LAYOUTS:
        widths = {"kdim": dims[1], "vdim": dims[2]} if len(dims) == 3 else {}
        keys = S if widths else T
        inputs = [torch.randn(B, n, d, dtype=torch.float64) for n, d in zip((T, S, S), dims, strict=False)]
        assert_equivalent(
            packed(batch_first=batch_first, **widths),
            [x if batch_first else x.transpose(0, 1) for x in inputs],
            need_weights=need_weights,
            attn_mask=mask_of(mask, keys),
            key_padding_mask=padding_of(padding, keys),
        )


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}])
@pytest.mark.parametrize("need_weights", [True, False])
def test_learned_and_zero_rows_and_missing_biases_are_kept(options, need_weights):
    for batch_first in (True, False):
        attention = packed(batch_first=batch_first, **options)
        x = torch.randn(B, T, E, dtype=torch.float64)
        x = x if batch_first else x.transpose(0, 1)
        masks = {"attn_mask": mask_of("bool", T), "key_padding_mask": padding_of("bool", T)}
        assert_equivalent(attention, [x], need_weights=need_weights)
        assert_equivalent(attention, [x], need_weights=need_weights, **masks)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_inputs_without_a_batch_axis_give_outputs_without_one(need_weights, batch_first):
    x = torch.randn(T, E, dtype=torch.float64)
    attention = packed(batch_first=batch_first)
    assert_equivalent(attention, [x], need_weights=need_weights)
    per_head = torch.randn(H, T, T, dtype=torch.float64)
    padding = torch.tensor([False] * 4 + [True])
    for options in ({"attn_mask": per_head}, {"key_padding_mask": padding}):
        assert_equivalent(attention, [x], need_weights=need_weights, **options)


@pytest.mark.parametrize("padding", [None, "bool"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_causal_hint_masks_as_the_mask_that_comes_with_it(padding, need_weights):
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = torch.randn(B, T, E, dtype=torch.float64)
    options = {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding_of(padding, T)}
    assert_equivalent(packed(batch_first=True), [x], need_weights=need_weights, **options)


def test_a_symbolic_trace_has_an_unpacked_attention_as_a_leaf():
    unpacked, x = unpack_attention(nn.MultiheadAttention(E, 2, batch_first=True)).eval(), torch.randn(2, 3, E)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = unpacked

        def forward(self, x):
            return self.attention(x, x, value=x, need_weights=False)[0]

    assert torch.equal(torch.fx.symbolic_trace(Layer())(x), Layer()(x))


def test_weights_of_single_heads_equal_the_packed_ones():
    x = torch.randn(B, T, E, dtype=torch.float64)
    assert_equivalent(packed(batch_first=True), [x], average_attn_weights=False)


def test_dropout_in_train_mode_draws_the_same_numbers():
    attention = packed(batch_first=True, dropout=0.5).train()
    unpacked = unpack_attention(attention)
    x = torch.randn(B, T, E, dtype=torch.float64)
    for need_weights in (True, False):
        torch.manual_seed(3)
        wanted = attention(x, x, x, need_weights=need_weights)[0]
        torch.manual_seed(3)
        torch.testing.assert_close(unpacked(x, x, x, need_weights=need_weights)[0], wanted)
        torch.manual_seed(4)
        assert not torch.allclose(unpacked(x, x, x, need_weights=need_weights)[0], wanted)
    assert torch.equal(unpacked.eval()(x, x, x)[0], unpacked(x, x, x)[0])


def test_a_causal_hint_without_a_mask_is_refused_as_torch_refuses_it():
    x = torch.randn(B, T, E, dtype=torch.float64)
    attention = packed()
    for module, error in ((attention, RuntimeError), (unpack_attention(attention), UsageError)):
        with pytest.raises(error, match="attn_mask"):
            module(x, x, x, is_causal=True, need_weights=False)


def test_a_mask_of_integers_is_refused_as_torch_refuses_it():
    x = torch.randn(T, B, E, dtype=torch.float64)
    attention = packed()
    for module, error in ((attention, AssertionError), (unpack_attention(attention), UsageError)):
        with pytest.raises(error, match="bool"):
            module(x, x, x, attn_mask=torch.ones(T, T, dtype=torch.uint8))


def test_projections_are_linears_with_leaf_parameters_of_their_own():
    attention = packed(batch_first=True)
    attention.in_proj_bias.requires_grad_(False)
    unpacked = unpack_attention(attention)
    assert all(isinstance(getattr(unpacked, f"{n}_proj"), nn.Linear) for n in ("q", "k", "v", "out"))
    assert unpacked.q_proj.weight.is_leaf and unpacked.q_proj.weight.requires_grad
    assert not unpacked.q_proj.bias.requires_grad
    before = attention.in_proj_weight.detach().clone()
    with torch.no_grad():
        unpacked.k_proj.weight.zero_()
    assert torch.equal(attention.in_proj_weight, before)


def test_shared_memory_makes_views_of_the_packed_rows():
    attention = packed()
    unpacked = unpack_attention(attention, share_memory=True)
    assert unpacked.v_proj.weight.data_ptr() == attention.in_proj_weight[2 * E :].data_ptr()


def test_unpacking_draws_no_random_numbers_and_works_on_meta():
    attention = packed()
    state = torch.get_rng_state()
    unpack_attention(attention)
    on_meta = unpack_attention(nn.MultiheadAttention(E, H, device="meta", dtype=torch.bfloat16))
    assert torch.equal(state, torch.get_rng_state())
    assert on_meta.q_proj.weight.is_meta and on_meta.q_proj.weight.dtype == torch.bfloat16


def test_a_checkpoint_of_the_packed_attention_loads():
    for options in ({}, {"kdim": 6, "vdim": 10}, {"bias": False}):
        attention, other = packed(**options), packed(**options)
        unpacked = unpack_attention(other)
        saved = attention.state_dict()
        keys = list(saved)
        unpacked.load_state_dict(saved)
        assert list(saved) == keys, "the caller's dictionary stays whole"
        wanted = dict(unpack_attention(attention).named_parameters())
        assert all(torch.equal(p, wanted[n]) for n, p in unpacked.named_parameters())


def test_an_unpacked_attention_survives_deepcopy_and_pickle():
    unpacked = unpack_attention(packed(add_bias_kv=True))
    x = torch.randn(T, B, E, dtype=torch.float64)
    buffer = io.BytesIO()
    torch.save(unpacked, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(unpacked), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x, x, x)[0], unpacked(x, x, x)[0])
        assert twin.q_proj.weight is not unpacked.q_proj.weight


def test_hooks_of_the_packed_attention_still_fire_and_can_be_removed():
    attention, fired = packed(), []
    handle = attention.register_forward_hook(lambda *_: fired.append(1))
    unpacked = unpack_attention(attention)
    x = torch.randn(T, B, E, dtype=torch.float64)
    unpacked(x, x, x)
    handle.remove()
    unpacked(x, x, x)
    assert fired == [1]


class Two(nn.Module):
    """An attention at two paths, another one, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(E, H, batch_first=True)
        self.again = self.first
        self.other = nn.Sequential(nn.MultiheadAttention(E, H, batch_first=True))
        self.head = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, x, x)[0] + self.again(x, x, x)[0]
        return self.head(self.other[0](x, x, x, need_weights=False)[0])


def test_normalizing_for_good_replaces_an_attention_at_every_path():
    model, x = Two(), torch.randn(B, T, E)
    wanted = model(x)
    assert normalize(model, only=["first.q_proj"]) == ["first"]
    assert isinstance(model.first, UnpackedAttention) and model.again is model.first
    assert isinstance(model.other[0], nn.MultiheadAttention)
    torch.testing.assert_close(model(x), wanted)
    assert normalize(model) == ["other.0"]
    assert normalize(model) == []
    torch.testing.assert_close(model(x), wanted)


def tree(model: nn.Module) -> dict:
    """Everything that identifies a model's modules, attributes and parameters, by identity."""
    return {
        name: (id(m), {k: id(v) for k, v in vars(m).items()}, {k: id(v) for k, v in m._modules.items()})
        for name, m in model.named_modules(remove_duplicate=False)
    }


@pytest.mark.parametrize("raises", [False, True])
def test_a_model_normalized_for_looking_at_is_its_old_self_afterwards(raises):
    model = nn.Sequential(Two(), encoder())
    before, parameters = tree(model), {n: id(p) for n, p in model.named_parameters()}
    packed_address = model[0].first.in_proj_weight.data_ptr()
    with pytest.raises(KeyError) if raises else contextlib.nullcontext(), normalized(model) as seen:
        assert seen is model and isinstance(model[0].again, UnpackedAttention)
        assert model[0].first.q_proj.weight.data_ptr() == packed_address, "no memory is used"
        assert "0.first.k_proj.weight" in dict(model.named_parameters())
        if raises:
            raise KeyError
    assert tree(model) == before
    assert {n: id(p) for n, p in model.named_parameters()} == parameters


def test_a_root_that_is_an_attention_is_seen_unpacked_too():
    attention = packed()
    with normalized(attention) as seen:
        assert isinstance(seen, UnpackedAttention)
    assert normalize(attention) == []


def test_an_attention_with_a_forward_or_a_weight_of_its_own_stays_packed():
    class Special(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({"a": Special(E, H), "b": nn.MultiheadAttention(E, H)})
    torch.nn.utils.parametrizations.spectral_norm(model["b"], "in_proj_weight")
    assert normalize(model) == []
    with normalized(model) as seen:
        assert all(isinstance(module, nn.MultiheadAttention) for module in seen.values())


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, mask_check=False).eval()


@pytest.mark.filterwarnings("ignore:.*nested tensors")  # torch says it once a process
def test_a_fused_encoder_calls_its_linears_once_its_fast_path_is_off():
    model, x, called = encoder(), torch.randn(B, T, E), []
    padding = torch.arange(T) >= torch.tensor([[T], [T - 1], [T - 2]])

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            called.append(1)
            return super().forward(x)

    for layer in model.layers:
        layer.linear1.__class__ = Counting
    keys, kind = list(model.state_dict()), type(model.layers[0])
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padding)
    assert not called, "torch's fused layer reads the weights"
    former = disable_fast_path(model, around=["layers.1.linear1"])
    assert set(former) == {"", "layers.1"}
    disable_fast_path(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(x, src_key_padding_mask=padding)[~padding], wanted[~padding])
    assert len(called) == 2
    assert list(model.state_dict()) == keys and type(model.layers[0]) is kind


def test_switching_the_fast_path_off_can_be_undone():
    model = encoder()
    switches = [model.use_nested_tensor, *(layer.activation_relu_or_gelu for layer in model.layers)]
    former = disable_fast_path(model)
    assert disable_fast_path(model) == {}
    restore_fast_path(model, former)
    assert [model.use_nested_tensor, *(layer.activation_relu_or_gelu for layer in model.layers)] == switches


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_unpacked_encoder_gives_the_same_values_in_both_modes(norm_first):
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = torch.randn(B, T, E), torch.arange(T) >= torch.tensor([[T], [T - 1], [T - 2]])
    for module in (model.train(), model.eval()):
        wanted = module(x, src_key_padding_mask=padding)
        twin = copy.deepcopy(module)
        assert normalize(twin) == ["layers.0.self_attn", "layers.1.self_attn"]
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                got = twin(x, src_key_padding_mask=padding)
            torch.testing.assert_close(got[~padding], wanted[~padding])
