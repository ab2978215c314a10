"""ACMs in live models: stand-ins, stashes, hooks, ties."""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acm_compiler as acm
from acm_compiler.acm import ACM
from acm_compiler.errors import AcmError
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.passes.rewrite.graft_modules import LostHookWarning
from acm_compiler.passes.rewrite.stand_ins import PassThrough, StashedACM, StashInput
from tests.helpers import models
from tests.helpers.models import HIDDEN, WIDTH
from tests.helpers.rewrite_cases import WRITTEN, answer, assert_close, planned, rewritten, state_of, trained


def stacked(block: nn.Module):
    """A case of one block."""
    return lambda: (models.Stack(block), models.example())


def kinds(model: nn.Module) -> set[str]:
    """The grafts that a rewritten model uses."""
    return {site.graft.kind for site in conversion(model).plan.sites}


def only(model: nn.Module) -> ACM:
    """The one ACM of a model."""
    (module,) = acm.sites(model).values()
    return module


# W


def test_a_module_at_two_places_becomes_one_acm_at_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = models.Mlp()
            self.b = self.a

        def forward(self, x):
            return x + self.b(x + self.a(x))

    model, x, copied = rewritten(stacked(Twice()))
    assert copied.blocks[0].a is copied.blocks[0].b is only(copied)
    assert_close(answer(copied, x), answer(model, x))


def test_modules_with_tied_weights_become_one_acm():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = models.Mlp(), models.Mlp()
            self.b.up.weight, self.b.up.bias = self.a.up.weight, self.a.up.bias
            self.b.down.weight, self.b.down.bias = self.a.down.weight, self.a.down.bias

        def forward(self, x):
            return x + self.b(x + self.a(x))

    model, x, copied = rewritten(stacked(Tied()))
    assert copied.blocks[0].a is copied.blocks[0].b is only(copied)
    assert_close(answer(copied, x), answer(model, x))
    block = acm.revert(copied).blocks[0]
    assert block.a is not block.b and block.a.up.weight is block.b.up.weight


def test_a_swallowed_dropout_is_applied_again_and_only_once():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.down(F.gelu(self.up(x))))

    _, _, copied = rewritten(stacked(models.Residual(Dropped())))
    module, x = only(copied), torch.randn(400, WIDTH)
    assert module.dropout == 0.5
    plain = module(x)
    for state in ("learners", "dense"):
        module.state = state
        share = (module.train()(x) == 0).float().mean()
        assert 0.45 < share < 0.55, state  # twice would be 0.75
        assert_close(module.eval()(x), plain)


def test_forward_hooks_move_to_the_acm_and_back():
    model, x, plan = planned(stacked(models.Residual(models.Mlp())))
    calls: list[tuple[torch.Size, torch.Size]] = []
    mlp = model.blocks[0].inner
    hook = mlp.register_forward_hook(lambda module, args, out: calls.append((args[0].shape, out.shape)))
    before = mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    expected = answer(model, x)
    acm.rewrite(model, plan, inplace=True)
    assert_close(answer(model, x), expected)
    only(model).state = "dense"  # the dense region must not run them a second time
    assert_close(answer(model, x), expected)
    assert len(calls) == 3 and len(set(calls)) == 1
    hook.remove()
    answer(model, x)
    assert len(calls) == 3
    acm.revert(model)
    assert torch.equal(answer(model, x), expected)
    before.remove()
    assert not torch.allclose(answer(model, x), expected)


def test_hooks_that_can_no_longer_run_are_named():
    model, _, plan = planned(stacked(models.Residual(models.Mlp())))
    model.blocks[0].inner.up.register_forward_hook(lambda *_: None)
    with pytest.warns(LostHookWarning, match=r"blocks\.0\.inner: forward hooks of the Linear up"):
        acm.rewrite(model, plan)


def test_a_patched_forward_is_named():
    model, _, plan = planned(stacked(models.Residual(models.Mlp())))
    inner = model.blocks[0].inner
    inner.forward = inner.forward
    with pytest.warns(LostHookWarning, match="a forward of its own"):
        acm.rewrite(model, plan)


class Decorated(models.Mlp):
    forward = torch.no_grad()(models.Mlp.forward)


class Block(models.Mlp):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize("inner", [Decorated, Block])
def test_a_forward_without_gradients_is_named(inner):
    """The ACM in its place has gradients, which reach its input."""
    model, _, plan = planned(stacked(models.Residual(inner())))
    with pytest.warns(LostHookWarning, match=rf"blocks\.0\.inner: torch\.no_grad, .* of the {inner.__name__}"):
        acm.rewrite(model, plan)


def test_a_forward_with_gradients_is_not():
    class Enabled(models.Mlp):
        forward = torch.enable_grad()(models.Mlp.forward)

    model, _, plan = planned(stacked(models.Residual(Enabled())))
    acm.rewrite(model, plan)


# T


def test_earlier_tiles_hand_their_input_on():
    model, x, copied = rewritten(stacked(models.Residual(nn.Sequential(*_tiles()))), sites="mlp")
    assert kinds(copied) == {"W"}  # a Sequential is one module

    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.drop, self.down = _tiles()

        def forward(self, x):
            return x + self.down(self.drop(self.act(self.up(x))))

    model, x, copied = rewritten(stacked(Loose()))
    block = copied.blocks[0]
    assert kinds(copied) == {"T"}
    assert [type(m) for m in (block.up, block.act, block.drop, block.down)] == [PassThrough] * 3 + [ACM]
    assert_close(answer(copied, x), answer(model, x))
    # in training too nothing touches what flows past them
    inputs: list[Tensor] = []
    block.down.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    answer(copied.train(), x)
    assert torch.equal(inputs[0], copied.embed(x))


def _tiles():
    return nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.5), nn.Linear(HIDDEN, WIDTH)


# S


def test_functions_between_run_on_a_dummy_and_leave_the_input_alone():
    model, _, copied = rewritten(WRITTEN["chunked_glu"])
    block = copied.blocks[0]
    assert kinds(copied) == {"S"}
    assert isinstance(block.up, StashInput) and isinstance(block.down, StashedACM)
    given = torch.randn(2, 5, WIDTH)
    kept = given.clone()
    hidden = block.up(given)
    assert hidden.shape == (2, 5, 2 * HIDDEN) and hidden.dtype == given.dtype
    hidden.mul_(3)
    assert torch.equal(given, kept)
    assert_close(block.down(hidden[..., :HIDDEN]), model.blocks[0].down(_glu(model.blocks[0], given)))


def _glu(block, x):
    value, gate = block.up(x).chunk(2, dim=-1)
    return value * torch.sigmoid(gate)


def test_threads_do_not_see_each_others_input():
    model, _, copied = rewritten(WRITTEN["chunked_glu"])
    block, wanted = copied.blocks[0], model.blocks[0]
    inputs = [torch.randn(2, 5, WIDTH) for _ in range(2)]
    turns, found = threading.Barrier(2, timeout=20), [None, None]

    def run(i):
        hidden = block.up(inputs[i])
        turns.wait()  # both have stashed before either takes
        found[i] = block.down(hidden[..., :HIDDEN])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, x in zip(found, inputs, strict=True):
        assert_close(result, wanted.down(_glu(wanted, x)))


def test_interleaved_runs_are_refused_instead_of_mixed_up():
    _, _, copied = rewritten(WRITTEN["chunked_glu"])
    block, x = copied.blocks[0], torch.randn(1, 2, WIDTH)
    first, second = block.up(x), block.up(x + 1)
    block.down(second[..., :HIDDEN])
    with pytest.raises(AcmError, match=r"blocks\.0\.down[\s\S]*exclude this site"):
        block.down(first[..., :HIDDEN])


def test_a_run_that_failed_midway_does_not_disturb_the_next():
    model, x, copied = rewritten(WRITTEN["chunked_glu"])
    copied.blocks[0].up(torch.randn(3, 4, WIDTH))  # and its last linear never comes
    assert_close(answer(copied, x), answer(model, x))
    copied.blocks[0].up(torch.randn(3, 4, WIDTH))
    assert torch.equal(answer(copy.deepcopy(copied), x), answer(copied, x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["chunked_glu", "functional"])
def test_gradients_are_the_same_under_checkpointing(name, reentrant):
    _, _, model = rewritten(WRITTEN[name])
    block, x = model.blocks[0], torch.randn(2, 5, WIDTH, requires_grad=True)
    block(x).square().sum().backward()
    expected = {path: p.grad.clone() for path, p in block.named_parameters() if p.grad is not None}
    x_grad, x.grad = x.grad.clone(), None
    block.zero_grad()
    checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
    # a reentrant checkpoint's forward takes no gradients, so the kernel answers, whose sums round in its own order
    assert_close(x.grad, x_grad)
    assert expected
    for path, grad in expected.items():
        assert_close(block.get_parameter(path).grad, grad)


# R


class Views(nn.Module):
    """One packed matrix for q, k, v and a bias, sliced in every way a user may write."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm = how, nn.LayerNorm(WIDTH)
        self.weight, self.bias = nn.Parameter(0.1 * torch.randn(3 * WIDTH, WIDTH)), nn.Parameter(torch.randn(3 * WIDTH))
        self.out = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))

    def parts(self):
        if self.how == "index":
            return [(self.weight[i : i + WIDTH], self.bias[i : i + WIDTH]) for i in (0, WIDTH, 2 * WIDTH)]
        if self.how == "chunk":
            return zip(self.weight.chunk(3), torch.chunk(self.bias, 3), strict=True)
        if self.how == "split":
            return zip(torch.split(self.weight, WIDTH, dim=0), self.bias.split([WIDTH] * 3), strict=True)
        rows = range(0, 3 * WIDTH, WIDTH)
        return [(self.weight.narrow(0, i, WIDTH), torch.narrow(self.bias, 0, i, WIDTH)) for i in rows]

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (models.heads(F.linear(h, w.to(h.dtype), b)) for w, b in self.parts())
        mixed = models.merged(F.scaled_dot_product_attention(q, k, v))
        flat = torch.addmm(torch.zeros((), device=x.device), mixed.flatten(0, 1), self.out.transpose(0, 1))
        return x + flat.view(x.shape)


@pytest.mark.parametrize("how", ["index", "chunk", "split", "narrow"])
def test_rows_of_a_packed_parameter_become_sites(how):
    model, x, copied = rewritten(stacked(Views(how)))
    assert kinds(copied) == {"R"}
    assert {site.role for site in conversion(copied).plan.sites} >= {"q", "k", "v"}
    assert "blocks.0.weight" not in copied.state_dict()
    assert_close(answer(copied, x), answer(model, x))


def test_rows_that_are_no_sites_stay_dense_and_trainable():
    model, x, plan = planned(stacked(Views("chunk")), sites="attn.k", init="random")
    copied = acm.rewrite(model, plan)
    (module,) = acm.sites(copied).values()
    module.state = "dense"
    assert_close(answer(copied, x), answer(model, x))
    answer(copied, x).square().sum().backward()
    rows = dict(copied.named_parameters())["blocks.0.weight"].grad.abs().sum(1)
    assert (rows[:WIDTH] > 0).all() and (rows[2 * WIDTH :] > 0).all()
    assert torch.equal(acm.revert(copied).blocks[0].weight, model.blocks[0].weight)


class OwnBias(nn.Module):
    """qkv as a function of its weight and of a bias made of three; the other projection is called by keyword."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        bias = torch.cat([self.q_bias + self.qkv.bias[:WIDTH], torch.zeros(WIDTH), self.v_bias])
        qkv = F.linear(self.norm(x), self.qkv.weight, bias)
        q, k, v = (models.heads(qkv[..., i : i + WIDTH]) for i in (0, WIDTH, 2 * WIDTH))
        return x + self.o(input=models.merged(F.scaled_dot_product_attention(q, k, v)))


def test_a_bias_that_the_model_computes_is_added_to_what_the_acm_gives_and_learns():
    model, x, copied = rewritten(stacked(OwnBias()))
    sites = conversion(copied).plan.sites
    assert [(site.name, site.graft.kind) for site in sites] == [
        ("blocks.0.qkv.weight_qkv", "R"),
        ("blocks.0.o.weight_o", "R"),
    ]
    assert sites[0].first[0].bias is None
    assert_close(answer(copied, x), answer(model, x))
    answer(copied, x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in (copied.blocks[0].q_bias, copied.blocks[0].qkv.bias))
    assert_close(torch.compile(copied, backend="eager", fullgraph=True)(x), answer(model, x))
    assert torch.equal(answer(acm.revert(copied), x), answer(model, x))


def test_a_bias_that_a_graph_of_the_users_computes_keeps_its_linear_dense():
    model, x = stacked(OwnBias())()
    plan = acm.plan(torch.fx.symbolic_trace(model.eval()), x)
    assert [site.role for site in plan.sites] == ["o"]
    assert "its bias is computed from parameters" in {s.name: s.reason for s in plan.skipped}["blocks.0.qkv.weight"]


class ReadByFunction(nn.Module):
    """Linears that are never called: a function reads their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x, scale=None, flip=False):
        h = F.silu(x @ self.up.weight.T + self.up.bias)
        y = self.down.bias + torch.matmul(h, self.down.weight.mT)
        if scale is not None:
            y = y * scale
        return x - y if flip else x + y


def test_the_forward_keeps_its_own_control_flow():
    model, x, copied = rewritten(stacked(ReadByFunction()))
    assert kinds(copied) == {"R"}
    assert_close(answer(copied, x), answer(model, x))
    h = torch.randn(2, 3, WIDTH)
    for options in ({}, {"scale": torch.tensor(3.0)}, {"flip": True}, {"scale": torch.tensor(2.0), "flip": True}):
        assert_close(copied.blocks[0](h, **options), model.blocks[0](h, **options))
    assert type(copied.blocks[0]) is ReadByFunction


@pytest.mark.parametrize("block", [lambda: Views("split"), models.Functional, models.ChunkedGlu])
def test_stand_ins_and_stashes_compile_into_one_graph(block):
    _, x, model = rewritten(stacked(block()), init="random")
    acm.set_k(model, 2)
    assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), answer(model, x))


def test_a_use_that_the_plan_did_not_see_is_refused_by_name():
    _, _, copied = rewritten(stacked(ReadByFunction()))
    block, x = copied.blocks[0], torch.randn(2, WIDTH)
    for misuse in (
        lambda: block.up.weight[:, :3],
        lambda: block.up.weight[0],
        lambda: torch.linalg.norm(block.up.weight),
        lambda: torch.addmm(x, x, block.up.weight.t()),
    ):
        with pytest.raises(AcmError, match=r"blocks\.0\.down: blocks\.0\.up\.weight was replaced"):
            misuse()


def test_stand_ins_show_what_a_forward_asks_of_a_parameter():
    model, _, copied = rewritten(stacked(ReadByFunction()))
    shown, real = copied.double().blocks[0].up.weight, model.double().blocks[0].up.weight
    for read in ("shape", "dtype", "device", "ndim"):
        assert getattr(shown, read) == getattr(real, read)
    assert (shown.dim(), shown.size(), shown.size(1), shown.numel()) == (2, real.size(), WIDTH, real.numel())
    assert shown.t().shape == shown.T.shape == shown.permute(1, 0).shape == real.t().shape
    assert not shown.requires_grad and not hasattr(shown, "grad")


@pytest.mark.parametrize("inner", ["W", "T", "S", "R"])
def test_code_that_reads_a_weights_type_still_runs(inner):
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x):
            assert self.up.in_features == self.down.out_features == WIDTH and self.up.bias is None
            h = x.to(self.up.weight.dtype)
            if inner == "T":
                return x + self.down(self.act(self.up(h))).to(self.down.weight.device)
            h = F.linear(h, self.up.weight) if inner == "R" else self.up(h)
            return x + self.down(F.gelu(h).to(self.down.weight.dtype))

    if inner == "W":
        model, x, copied = rewritten(WRITTEN["fused_qkv"])
        linear, original = copied.blocks[0].o, model.blocks[0].o
        assert (linear.weight.dtype, linear.weight.shape) == (original.weight.dtype, original.weight.shape)
        assert linear.in_features == WIDTH and linear.bias.shape == original.bias.shape
        return
    model, x, copied = rewritten(stacked(Casting()))
    assert kinds(copied) == {inner}
    assert_close(answer(copied, x), answer(model, x))


# ties to what is no site


def test_a_weight_that_the_model_also_uses_elsewhere_stays_trainable():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = models.Attention()
            self.gain = nn.Linear(WIDTH, WIDTH)
            self.gain.bias = self.attention.o.bias  # read by a module that is no site

        def forward(self, x):
            return x + self.attention(x) * self.gain(x).mean(-1, keepdim=True).detach()

    model, x, plan = planned(stacked(Tied()), sites="attn")
    if any(site.name.endswith(".o") for site in plan.sites):
        pytest.fail("a bias with another reader must not be taken")
    copied = acm.rewrite(model, plan)
    assert copied.blocks[0].attention.o.bias.requires_grad
    assert_close(answer(copied, x), answer(model, x))


def test_dense_regions_are_frozen_and_thaw_again():
    model, _, plan = planned(WRITTEN["parallel"])
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    acm.rewrite(model, plan, inplace=True)
    assert not any(p.requires_grad for module in acm.sites(model).values() for p in module.dense.parameters())
    acm.revert(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_no_warning_without_hooks():
    model, _, plan = planned(WRITTEN["parallel"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acm.rewrite(model, plan)


def test_a_failed_graft_leaves_no_trace_on_the_original():
    model, _, plan = planned(WRITTEN["functional"])
    before = state_of(model)
    acm.rewrite(model, plan)
    assert model.state_dict().keys() == before.keys()
    assert isinstance(model.blocks[0].w1, nn.Parameter)
    assert trained(WRITTEN["functional"])[0].state_dict().keys() == before.keys()
