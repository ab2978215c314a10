"""LoRA of peft on sites: adapters run, learn, merge into every k, are saved and loaded; what cannot be is refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import acm_compiler as acm
from acm_compiler.errors import PackageMissing, TrainingFailed, UsageError
from tests.helpers.models import Attention, Functional, Mlp, Residual, Stack, SwiGlu, example
from tests.helpers.rewrite_cases import assert_close, give_budgets

peft = pytest.importorskip("peft")
pytest.importorskip("acm_compiler.hf")
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:peft")

FORMS = {
    "low-rank projections": ({"form": "svd"}, {}),
    "slices of projections": ({"form": "slices"}, {}),
    "exact with all learners": ({"form": "svd", "lossless": True}, {"lossless": True}),
    "one second layer for each k": ({}, {"second_layer": "per_k"}),
}


def converted(*blocks, attn=None, mlp=None):
    """A model whose sites all run learners with random weights, and its input; what rules for sites say beside."""
    torch.manual_seed(0)
    model, x = Stack(*blocks).eval(), example()
    model = acm.rewrite(
        model, acm.plan(model, x, sites=[{"match": "attn"} | (attn or {}), {"match": "mlp"} | (mlp or {})])
    )
    for part in acm.sites(model).values():
        part.state = "learners"
        with torch.no_grad():
            for parameter in part.learners.parameters():
                parameter.normal_(std=0.3)
    return model, x


def all_kinds(attn=None, mlp=None):
    return converted(Residual(Attention()), Residual(Mlp()), SwiGlu(), attn=attn, mlp=mlp)


def adapt(model, *, targets=None, name="default", **options):
    """`model` with random adapters at its sites, or at `targets`."""
    config = peft.LoraConfig(**{"target_modules": targets or list(acm.sites(model)), "r": 3, "lora_alpha": 6} | options)
    return peft.get_peft_model(model, config, adapter_name=name)


def outputs(model, x):
    """[k, ...]: the outputs with each k fixed, and of a mix of them."""
    found = []
    for k in (1, 2, 4, None):
        acm.set_k(model, k)
        with torch.no_grad():
            found.append(model(x))
    return torch.stack(found)


@pytest.mark.parametrize("form", FORMS)
def test_adapters_change_the_outputs_and_merge_into_every_k(form):
    model, x = all_kinds(*FORMS[form])
    plain = outputs(model, x)
    adapted = adapt(model, init_lora_weights=False)
    expected = outputs(adapted, x)
    assert (expected - plain).abs().amin((1, 2)).min() > 1e-4
    with adapted.disable_adapter():
        assert torch.equal(outputs(adapted, x), plain)
    assert_close(outputs(adapted, x), expected)
    adapted.merge_adapter()
    assert_close(outputs(adapted, x), expected)
    adapted.unmerge_adapter()
    assert_close(outputs(adapted, x), expected)
    merged = adapted.merge_and_unload()
    assert merged is model and not any(hasattr(module, "base_layer") for module in merged.modules())
    assert_close(outputs(merged, x), expected)


def test_with_all_learners_an_adapter_is_the_one_of_the_dense_layer():
    model, x = converted(Residual(Mlp()))
    (site,) = acm.sites(model).values()
    adapt(model, init_lora_weights=False)
    layer = model.blocks[0].inner
    down, up = ({key: part.weight for key, part in half["default"].items()} for half in (layer.lora_A, layer.lora_B))
    assert {key: tuple(w.shape) for key, w in down.items()} == {"w_in": (3, 16), "w_out": (3, 32)}
    assert {key: tuple(w.shape) for key, w in up.items()} == {"w_in": (32, 3), "w_out": (16, 3)}
    x = torch.randn(7, 16)
    learners = site.learners
    first = F.linear(x, learners.w_in.flatten(0, 1), learners.b_in.flatten()) + 2 * x @ down["w_in"].T @ up["w_in"].T
    h = F.gelu(first)
    expected = F.linear(h, learners.w_out.flatten(1), learners.b_out[4]) + 2 * h @ down["w_out"].T @ up["w_out"].T
    acm.set_k(model, 4)
    assert_close(layer(x), expected)


def test_a_new_adapter_changes_nothing_and_learns_alone():
    model, x = all_kinds()
    plain, before = outputs(model, x), copy.deepcopy(model.state_dict())
    adapted = adapt(model)
    assert torch.equal(outputs(adapted, x), plain)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    target, losses = torch.randn(2, 3), []
    for _ in range(12):
        loss = F.mse_loss(adapted(x), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    after = adapted.unload().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_gradients_are_those_of_the_merged_weights():
    model, x = all_kinds()
    adapted = adapt(model.double(), init_lora_weights=False)
    parameters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    adapted(x.double()).square().sum().backward()
    for name, parameter in list(parameters.items())[::3]:
        step, direction = 1e-6, torch.randn_like(parameter)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                values.append(float(adapted(x.double()).square().sum()))
                parameter.sub_(sign * step * direction)
        slope = (values[0] - values[1]) / (2 * step)
        assert math.isclose(slope, float((parameter.grad * direction).sum()), rel_tol=1e-4, abs_tol=1e-6), name


def test_gates_are_trained_beside_it_and_budgets_hold():
    model, x = all_kinds()
    give_budgets(model)
    adapted = adapt(model, init_lora_weights=False)
    for part in acm.sites(adapted).values():
        part.gate.requires_grad_(True)
    acm.relax(adapted.train(), 0.8)
    (adapted(x).square().mean() + acm.losses(adapted, 0.5)["budget"]).backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert any(".gate." in name for name in trained)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in trained.values())
    acm.relax(adapted.eval(), None)
    assert acm.set_budget(adapted, 0.6) == acm.set_budget(adapted, 0.6)


def test_adapters_are_saved_beside_the_model_and_loaded(tmp_path):
    model, x = all_kinds()
    give_budgets(model)
    acm.save(model, tmp_path / "model")
    adapted = adapt(model, init_lora_weights=False)
    adapted.save_pretrained(tmp_path / "adapter")
    acm.set_budget(adapted, 0.6)
    base = acm.load(tmp_path / "model", base_model=Stack(Residual(Attention()), Residual(Mlp()), SwiGlu()).eval())
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(outputs(loaded, x), outputs(adapted, x))
    acm.save(loaded.merge_and_unload(), tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").exists()


def test_several_adapters_take_turns_and_add_up():
    model, x = converted(Residual(Mlp()))
    adapted = adapt(model, init_lora_weights=False)
    first = outputs(adapted, x)
    adapted.add_adapter("other", peft.LoraConfig(target_modules=list(acm.sites(model)), r=2, init_lora_weights=False))
    assert torch.equal(outputs(adapted, x), first)
    adapted.set_adapter("other")
    other = outputs(adapted, x)
    adapted.base_model.set_adapter(["default", "other"])
    both = outputs(adapted, x)
    assert len({float(found.sum()) for found in (first, other, both)}) == 3
    adapted.delete_adapter("other")
    assert torch.equal(outputs(adapted, x), first)
    adapted.delete_adapter("default")


def test_sites_of_bare_parameters_run_their_adapters():
    model, x = converted(Functional())
    plain = outputs(model, x)
    adapted = adapt(model, init_lora_weights=False)
    expected = outputs(adapted, x)
    assert (expected - plain).abs().amin((1, 2)).min() > 1e-4
    assert_close(outputs(adapted.merge_and_unload(), x), expected)


def test_bfloat16():
    model, x = all_kinds()
    half = adapt(model.bfloat16(), init_lora_weights=False)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert_close(outputs(half, x.bfloat16()).float(), outputs(half.merge_and_unload(), x.bfloat16()).float())


@pytest.mark.slow
def test_compiled():
    model, x = all_kinds()
    adapted = adapt(model, init_lora_weights=False)
    acm.set_k(adapted, 2)
    with torch.no_grad():
        assert_close(torch.compile(adapted, backend="acm", options={"fallback": "silent"})(x), adapted(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.1}, r"lora_dropout does not work on an ACM .*expected lora_dropout=0.0"),
        ({"use_dora": True}, "use_dora does not work"),
        ({"lora_bias": True}, "lora_bias does not work"),
        ({"bias": "all"}, "bias does not work on an ACM .*expected bias=none"),
        ({"bias": "lora_only"}, "bias does not work"),
        ({"init_lora_weights": "olora"}, "init_lora_weights does not work"),
    ],
)
def test_options_that_no_update_of_weights_has_are_refused(options, message):
    model, _ = converted(Residual(Mlp()))
    with pytest.raises(UsageError, match=message) as caught:
        adapt(model, **options)
    assert caught.value.where == "blocks.0.inner"


def test_sites_that_would_not_run_them_are_refused():
    torch.manual_seed(0)
    model = Stack(Residual(Attention())).eval()
    model = acm.rewrite(model, acm.plan(model, example()))
    with pytest.raises(UsageError, match=r"never fitted"):
        adapt(model)
    model, _ = converted(Residual(Mlp()))
    with pytest.raises(UsageError, match="before it is quantised"):
        adapt(acm.quantize(model))


@pytest.mark.parametrize("call", [acm.quantize, acm.revert, lambda m: acm.calibrate(m, [example()]), "save", "export"])
def test_calls_that_would_leave_them_out_are_refused(call, tmp_path):
    model, x = converted(Residual(Mlp()))
    adapted = adapt(model)
    calls = {
        "save": lambda m: acm.save(m, tmp_path / "out"),
        "export": lambda m: acm.export(m, tmp_path / "out", x),
    }
    with pytest.raises(UsageError, match="takes no adapters on learners") as caught:
        calls.get(call, call)(adapted)
    assert "merge_and_unload" in caught.value.fix and not (tmp_path / "out").exists()


def test_a_batch_of_mixed_adapters_and_broken_weights_are_refused():
    model, _ = converted(Residual(Mlp()))
    adapted = adapt(model, init_lora_weights=False)
    with pytest.raises(UsageError, match="same adapters"):
        adapted.base_model.model.blocks[0].inner(torch.randn(1, 2, 16), adapter_names=["default"])
    before = copy.deepcopy(model.blocks[0].inner.base_layer.learners.state_dict())
    adapted.base_model.model.blocks[0].inner.lora_B["default"]["w_out"].weight.data.fill_(torch.inf)
    with pytest.raises(TrainingFailed, match="not finite"):
        adapted.merge_and_unload(safe_merge=True)
    after = model.blocks[0].inner.base_layer.learners.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_adapters_on_gates_are_refused_with_what_to_target():
    model, x = converted(Residual(Mlp()))
    with pytest.raises(UsageError, match="a layer of its gate is a peft") as caught:
        adapt(model, targets="all-linear")(x)
    assert "target_modules" in caught.value.fix


def test_a_peft_that_gives_loaded_adapters_other_outputs_is_refused(monkeypatch):
    model, _ = all_kinds()
    monkeypatch.setattr(peft, "__version__", "0.20.1")
    with pytest.raises(PackageMissing, match=r"0\.21 or later[\s\S]*peft 0\.20\.1"):
        adapt(model)
