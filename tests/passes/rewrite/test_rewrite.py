"""A rewritten model is the user's model, answering as before, until the user decides otherwise."""

import copy
import dataclasses
import io
import time

import pytest
import torch
from torch import fx, nn

import acm_compiler as acm
from acm_compiler.acm import ACM
from acm_compiler.errors import (
    AlreadyRewritten,
    CompiledModelError,
    NoDenseRegion,
    NothingToConvert,
    PlanMismatch,
    UsageError,
)
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.passes.rewrite.rewrite import copied
from acm_compiler.planning.cost import learner_unit, macs_per_learner
from acm_compiler.planning.plan import Plan, fingerprint
from tests.helpers import models
from tests.helpers.rewrite_cases import (
    ALL,
    WRITTEN,
    answer,
    assert_close,
    assert_same_state,
    planned,
    rewritten,
    state_of,
    trained,
)


@pytest.mark.parametrize("name", ALL)
def test_a_fresh_rewrite_answers_as_the_original_and_leaves_it_untouched(name):
    model, x, plan = planned(ALL[name])
    before, modules = state_of(model), {path: type(module) for path, module in model.named_modules()}
    expected = answer(model, x)
    copied = acm.rewrite(model, plan)
    assert_close(answer(copied, x), expected)
    assert_same_state(model.state_dict(), before)
    assert {path: type(module) for path, module in model.named_modules()} == modules
    assert torch.equal(answer(model, x), expected)
    assert type(copied) is type(model)
    assert list(acm.sites(copied)) == [site.name for site in plan.sites]
    assert all(isinstance(copied.get_submodule(site.name), ACM) for site in plan.sites)


def test_inputs_in_the_place_of_a_plan_are_refused():
    with pytest.raises(UsageError, match=r"not a plan \(found Tensor\)\n  plan = acm\.plan"):
        acm.rewrite(nn.Linear(4, 4), torch.zeros(2, 4))


@pytest.mark.parametrize("name", ALL)
def test_revert_gives_the_original_back(name):
    model, x, copied = rewritten(ALL[name])
    assert acm.revert(copied) is copied
    assert_same_state(copied.state_dict(), state_of(model))
    assert fingerprint(copied) == fingerprint(model)
    assert torch.equal(answer(copied, x), answer(model, x))
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
    for (path, module), (_, original) in zip(copied.named_modules(), model.named_modules(), strict=True):
        assert type(module) is type(original), path


def test_a_part_of_a_model_is_not_reverted():
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)))
    copied = acm.rewrite(whole, acm.plan(whole, torch.randn(3, 8)))
    with pytest.raises(UsageError, match=r"acm\.revert is for the whole rewritten model"):
        acm.revert(copied[0])
    assert len(acm.sites(copied)) > 1


def test_a_part_with_every_site_is_neither_reverted_nor_saved(tmp_path):
    body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))
    whole = nn.Sequential(body, nn.LayerNorm(8))
    copied = acm.rewrite(whole, acm.plan(whole, torch.randn(3, 8)))
    for act in (acm.revert, lambda part: acm.save(part, tmp_path / "out")):
        with pytest.raises(UsageError, match="this is a part of a rewritten model"):
            act(copied[0])
    assert set(acm.sites(copied)) == {"0.0"} and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ALL)
def test_what_was_not_replaced_keeps_its_names_and_values(name):
    model, _, copied = rewritten(ALL[name])
    refs = [ref for site in conversion(copied).plan.sites for ref in site.refs]
    original = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(original.get(name)) for ref in refs for name in (ref.weight, ref.bias)}
    packed = ("in_proj_weight", "in_proj_bias")
    kept = [name for name, p in original.items() if id(p) not in replaced and not name.endswith(packed)]
    state = copied.state_dict()
    assert all(torch.equal(state[name], original[name]) for name in kept)
    assert len(kept) > 3


@pytest.mark.parametrize("name", ["torchvision_vit", "hf_bert", "hf_llama", "encoder", "functional", "chunked_glu"])
def test_gradients_reach_every_parameter_of_every_acm(name):
    _, x, model = rewritten(ALL[name], init="random")
    acm.relax(model.train(), 0.8)
    # the mean of squares: a sum would be constant behind a norm
    answer(model, x).square().mean().backward()
    for site, module in acm.sites(model).items():
        assert module.choices
        for path, parameter in module.named_parameters():
            if not path.startswith("dense."):
                assert parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{site}.{path}"
            else:
                assert parameter.grad is None and not parameter.requires_grad


@pytest.mark.parametrize("name", ["torchvision_vit", "hf_gpt2", "encoder", "chunked_glu", "einsum", "shared"])
def test_copies_and_pickles_answer_alike_and_share_nothing(name):
    _, x, model = rewritten(ALL[name])
    expected = answer(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(answer(other, x), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(answer(model, x), expected)


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_generate_is_the_same(name):
    model, x, copied = rewritten(ALL[name])
    for options in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}, {"use_cache": False}):
        expected = model.generate(x, max_new_tokens=5, pad_token_id=0, **options)
        assert torch.equal(copied.generate(x, max_new_tokens=5, pad_token_id=0, **options), expected)


@pytest.mark.parametrize("name", ["hf_llama", "encoder", "functional", "einsum"])
def test_a_state_dict_loads_into_another_rewritten_model(name):
    original, x, plan = planned(ALL[name], init="random")
    model, other = acm.rewrite(original, plan), acm.rewrite(original, plan)
    assert not torch.equal(answer(other, x), answer(model, x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(answer(other, x), answer(model, x))


def test_no_random_start_is_drawn_over_the_learners_by_transformers():
    _, _, copied = rewritten(ALL["hf_bert"])
    before = state_of(copied)
    copied.init_weights()
    after = copied.state_dict()
    names = [name for name in before if ".learners." in name or ".gate." in name]
    assert names and all(torch.equal(after[name], before[name]) for name in names)


def test_half_precision_follows_to_all_parts():
    _, x, model = rewritten(ALL["chunked_glu"])
    expected = answer(model, x)
    model.to(torch.bfloat16)
    assert answer(model, x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(answer(model, x.bfloat16()).float(), expected, atol=0.1, rtol=0.1)
    assert all(module.dense.first_weight.dtype == torch.bfloat16 for module in acm.sites(model).values())


def test_inplace_changes_the_model_itself_and_gives_the_very_modules_back():
    model, x, plan = planned(ALL["parallel"])
    expected, mlp, weight = answer(model, x), model.blocks[0].mlp, model.blocks[0].attention.q.weight
    assert acm.rewrite(model, plan, inplace=True) is model
    assert_close(answer(model, x), expected)
    acm.revert(model)
    assert model.blocks[0].mlp is mlp and model.blocks[0].attention.q.weight is weight


def test_states_choices_and_costs_are_those_of_a_fresh_start():
    _, _, model = rewritten(ALL["parallel"])
    plan = conversion(model).plan
    for site in plan.sites:
        module = acm.sites(model)[site.name]
        assert module.state == ("dense" if site.kind == "linear" else "learners")
        assert (int(module.k_lo), int(module.k_hi)) == (site.learners, site.learners)
        assert module.cost == macs_per_learner(site) / learner_unit(plan.sites)
        assert module.conversion is conversion(model)


def test_a_random_start_changes_answers_and_runs_its_learners():
    model, x, copied = rewritten(ALL["parallel"], init="random")
    assert all(module.state == "learners" for module in acm.sites(copied).values())
    assert not torch.allclose(answer(copied, x), answer(model, x), atol=1e-3)


@pytest.mark.parametrize("learners", [3, 5])
@pytest.mark.parametrize("name", ["parallel", "swiglu", "chunked_glu"])
def test_widths_that_n_does_not_divide_are_padded_without_loss(name, learners):
    model, x, copied = rewritten(ALL[name], learners=learners)
    assert models.HIDDEN % learners
    assert_close(answer(copied, x), answer(model, x))


@pytest.mark.parametrize("second_layer", ["shared", "shared_top", "per_k", "original"])
def test_every_second_layer_starts_exact(second_layer):
    model, x, plan = planned(ALL["swiglu"])
    changed = tuple(dataclasses.replace(site, second_layer=second_layer) for site in plan.sites)
    assert_close(answer(acm.rewrite(model, dataclasses.replace(plan, sites=changed)), x), answer(model, x))


def test_a_lossless_linear_site_runs_its_dense_weight_at_n():
    model, x, copied = rewritten(ALL["fused_qkv"], lossless=True)
    for module in acm.sites(copied).values():
        assert module.learners.form == "linear"
        module.state = "learners"
    assert_close(answer(copied, x), answer(model, x))


def test_a_plan_from_json_rewrites_the_same():
    model, x, plan = planned(ALL["hf_gpt2"])
    again = acm.rewrite(model, Plan.from_json(plan.to_json()))
    assert torch.equal(answer(again, x), answer(acm.rewrite(model, plan), x))


def test_only_the_attentions_of_sites_are_unpacked():
    model, x, plan = planned(ALL["torchvision_vit"], sites="encoder.layers.encoder_layer_1.self_attention.out_proj")
    copied = acm.rewrite(model, plan)
    layers = copied.encoder.layers
    assert type(layers.encoder_layer_0.self_attention) is nn.MultiheadAttention
    assert type(layers.encoder_layer_1.self_attention) is not nn.MultiheadAttention
    assert_close(answer(copied, x), answer(model, x))


def test_torchs_fused_encoder_path_does_not_go_around_the_acms():
    model, x, plan = planned(ALL["encoder"], sites="mlp", init="random")
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 5:] = True
    copied = acm.rewrite(model, plan)
    with torch.no_grad():
        for k in (0, 4):
            acm.set_k(copied, k)
            with acm.record(copied) as usage:
                copied(x, src_key_padding_mask=mask)
            assert all((count[~mask] == k).all() and (count[mask] == -1).all() for count in usage.k.values())
        acm.revert(copied)
        assert torch.equal(copied(x), model(x))
    switches = [layer.activation_relu_or_gelu for layer in copied.layers]
    assert switches == [layer.activation_relu_or_gelu for layer in model.layers] != [0, 0]


def test_ddp_wraps_and_trains_a_rewritten_model(tmp_path):
    _, x, model = rewritten(ALL["chunked_glu"], init="random")
    acm.relax(model.train(), 0.8)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/sync", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            wrapped(x).square().mean().backward()
        assert list(acm.sites(wrapped)) == list(acm.sites(model))
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        acm.revert(wrapped)
        assert not any(isinstance(module, ACM) for module in wrapped.modules())
    finally:
        torch.distributed.destroy_process_group()


# a user's own graph


def _traced(name):
    model, x = trained(WRITTEN[name])
    return fx.symbolic_trace(model), x


def _exported(name):
    model, x = trained(WRITTEN[name])
    return torch.export.export(model, (x,)).module(), x


@pytest.mark.parametrize("make", [_traced, _exported])
@pytest.mark.parametrize("name", ["einsum", "functional", "chunked_glu", "swiglu", "shared", "parallel"])
def test_a_graph_module_gets_one_node_per_run_of_a_site(make, name):
    model, x = make(name)
    plan, expected, before = acm.plan(model, x), model(x), state_of(model)
    copied = acm.rewrite(model, plan)
    assert_close(copied(x), expected)
    assert_same_state(model.state_dict(), before)
    nodes = [node for node in copied.graph.nodes if "acm_site" in node.meta]
    assert len(nodes) == sum(site.calls for site in plan.sites)
    for node in nodes:
        assert node.op == "call_module" and node.target == node.meta["acm_site"]
        assert isinstance(copied.get_submodule(node.target), ACM)
        if make is _exported:
            assert node.meta["val"].shape[:2] == x.shape[:2] and node.meta["stack_trace"]
    copied.graph.lint()
    replaced = {ref.weight for site in plan.sites for ref in site.refs}
    assert replaced and replaced.isdisjoint(copied.state_dict())
    assert torch.equal(copy.deepcopy(copied)(x), copied(x))
    acm.revert(copied)
    assert torch.equal(copied(x), expected)
    assert_same_state(copied.state_dict(), before)


def test_a_graph_that_calls_a_whole_block_is_rewritten_inside_it():
    model, x = trained(WRITTEN["functional"])

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module, path):
            return isinstance(module, models.Functional)

    traced = fx.GraphModule(model, Tracer().trace(model))
    copied = acm.rewrite(traced, acm.plan(traced, x))
    assert_close(copied(x), model(x))
    acm.set_k(copied, 0)
    assert not torch.allclose(copied(x), model(x), atol=1e-3)
    assert torch.equal(acm.revert(copied)(x), model(x))


def test_attentions_inside_a_graph_module_are_rewritten_too():
    model, x = trained(ALL["torchvision_vit"])
    traced = fx.symbolic_trace(model)
    plan = acm.plan(traced, x)
    assert {site.role for site in plan.sites} == {None, "q", "k", "v", "o"}
    copied = acm.rewrite(traced, plan)
    assert_close(copied(x), model(x))
    acm.revert(copied)
    assert torch.equal(copied(x), model(x))
    assert_same_state(copied.state_dict(), state_of(traced))


# revert and finalize


def test_finalize_frees_what_no_forward_runs():
    _, x, model = rewritten(ALL["parallel"])
    expected, before = answer(model, x), sum(p.numel() for p in model.parameters())
    assert acm.finalize(model) is model
    assert torch.equal(answer(model, x), expected)
    assert sum(p.numel() for p in model.parameters()) < before
    kept = {module.dense is not None for module in acm.sites(model).values() if module.state == "dense"}
    assert kept == {True}
    with pytest.raises(NoDenseRegion, match=r"blocks\.0\.mlp[\s\S]*base_model"):
        acm.revert(model)


def test_revert_keeps_what_was_trained_since():
    model, _, copied = rewritten(ALL["swiglu"])
    with torch.no_grad():
        copied.head.weight.add_(1.0)
    acm.revert(copied.train())
    assert torch.equal(copied.head.weight, model.head.weight + 1)
    assert copied.blocks[0].down.training


# refusals


def test_a_second_rewrite_is_refused():
    model, _, plan = planned(ALL["swiglu"])
    model = acm.rewrite(model, plan)
    with pytest.raises(AlreadyRewritten):
        acm.rewrite(model, plan)


def test_another_model_is_refused():
    _, _, plan = planned(ALL["swiglu"])
    with pytest.raises(PlanMismatch):
        acm.rewrite(trained(ALL["chunked_glu"])[0], plan)


def test_a_compiled_model_is_refused():
    model, _, plan = planned(ALL["swiglu"])
    with pytest.raises(CompiledModelError, match="then compile"):
        acm.rewrite(torch.compile(model, backend="eager"), plan)


def test_an_empty_plan_is_refused_with_its_skips():
    model, x = trained(lambda: (models.Stack(models.Escaping()), models.example()))
    with pytest.raises(NothingToConvert, match="hidden value is also read by"):
        acm.rewrite(model, acm.plan(model, x))


@pytest.mark.parametrize(
    "change",
    [
        lambda site: dataclasses.replace(site, graft=dataclasses.replace(site.graft, modules=("blocks.0.gone",))),
        lambda site: dataclasses.replace(site, last=dataclasses.replace(site.last, weight="blocks.0.gone.weight")),
        lambda site: dataclasses.replace(site, d_out=site.d_out + 1),
    ],
)
def test_a_plan_whose_names_or_sizes_are_wrong_leaves_the_model_alone(change):
    model, x, plan = planned(ALL["swiglu"])
    before, expected = state_of(model), answer(model, x)
    wrong = dataclasses.replace(plan, sites=tuple(change(site) for site in plan.sites))
    with pytest.raises(PlanMismatch, match="plan again"):
        acm.rewrite(model, wrong, inplace=True)
    assert_same_state(model.state_dict(), before)
    assert torch.equal(answer(model, x), expected)


def test_a_model_that_cannot_be_copied_can_be_rewritten_in_place():
    model, x, plan = planned(ALL["swiglu"])
    model.cache = model.embed.weight * 2  # part of a graph: torch refuses to copy it
    with pytest.raises(UsageError, match="inplace=True"):
        acm.rewrite(model, plan)
    assert_close(answer(acm.rewrite(model, plan, inplace=True), x), answer(trained(ALL["swiglu"])[0], x))


@pytest.mark.parametrize("name", ["cache", "seen", "buffer"])
def test_what_keeps_a_model_from_being_copied_is_named(name):
    model, _, plan = planned(ALL["swiglu"])
    inner, value = model.blocks[0], model.embed.weight * 2
    if name == "buffer":
        inner.register_buffer(name, value)
    else:
        setattr(inner, name, {"cache": value, "seen": {"last": [value]}}[name])
    with pytest.raises(UsageError, match=rf"blocks\.0\.{name}: .*\n  detach blocks\.0\.{name}, or pass inplace"):
        acm.rewrite(model, plan)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_old_norms_of_weights_keep_a_model_from_being_copied_in_words(norm):
    model, _, _ = planned(ALL["swiglu"])
    model.first = getattr(nn.utils, norm)(nn.Linear(3, 3))
    model.first(torch.zeros(1, 3))
    words = rf"(?s)^first.weight: .* that torch.nn.utils.{norm} computes.*utils.remove_{norm}.*parametrizations.{norm}"
    with pytest.raises(UsageError, match=words):
        copied(model)


@pytest.mark.slow
def test_vit_b_16_is_rewritten_in_seconds():
    from torchvision.models import vit_b_16

    model = vit_b_16().eval()
    plan = acm.plan(model, torch.zeros(1, 3, 224, 224))
    assert len(plan.sites) == 60
    start = time.perf_counter()
    acm.rewrite(model, plan)
    assert time.perf_counter() - start < 20


def inference_tensors(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_inference()]


@pytest.mark.parametrize("name", ["parallel", "encoder", "chunked_glu"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_rewrite_in_inference_mode_makes_ordinary_tensors(name, inplace):
    model, _, plan = planned(ALL[name])
    with torch.inference_mode():
        converted = acm.rewrite(model, plan, inplace=inplace)
    assert inference_tensors(converted) == []
    acm.set_k(converted, max(site.learners for site in plan.sites))
    with torch.inference_mode():
        acm.revert(converted)
    assert inference_tensors(converted) == []
    converted.requires_grad_(True)


def test_a_model_made_in_inference_mode_is_copied_or_refused():
    with torch.inference_mode():
        model, _, plan = planned(ALL["parallel"])
        model = copy.deepcopy(model)
    assert inference_tensors(acm.rewrite(model, plan)) == []
    with pytest.raises(UsageError, match=r"inference_mode[\s\S]*deepcopy"):
        acm.rewrite(model, plan, inplace=True)


def test_a_model_moved_in_inference_mode_runs_on_and_says_that_it_cannot_be_calibrated():
    model, x, plan = planned(ALL["parallel"])
    converted = acm.rewrite(model, plan)
    with torch.inference_mode():
        converted._apply(torch.clone)
    acm.set_k(converted, max(site.learners for site in plan.sites))
    with pytest.raises(UsageError, match=r"inference_mode[\s\S]*deepcopy"):
        acm.calibrate(converted, [x])
