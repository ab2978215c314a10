"""A rewritten model of the zoo works wherever the original did: one test per thing that users do with a model.

Where the original itself cannot do a thing, `tests.zoo.exceptions` says so by name, and that is checked.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import acm_compiler as acm
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.errors import AcmError
from acm_compiler.runtime import measure_budgets as measure
from acm_compiler.sources.inputs import call_model, split_inputs
from acm_compiler.sources.user_code import Attempt
from tests.helpers.rewrite_cases import assert_same_state, state_of
from tests.zoo.cases import Case, answers, assert_alike, case, every, plan_of
from tests.zoo.catalogue import MODELS
from tests.zoo.exceptions import EXCEPTIONS
from tests.zoo.shapes import cast, other_shape, varied

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models' makers
CONVERTIBLE = [name for name, model in MODELS.items() if model.sites]
WAYS = {
    "greedily": {},
    "with beams": {"num_beams": 2},
    "without a cache": {"use_cache": False},
    "with a static cache": {"cache_implementation": "static"},
}
_BATCHES = 2


@pytest.fixture(scope="module", params=every("zoo_proofs", CONVERTIBLE))
def one(request):
    """A model of the zoo."""
    return case(request.param)


@pytest.fixture(scope="module")
def calibrated(one):
    """A rewritten copy after a lossless calibration on a few batches, at k = N."""
    of_original(one, "backward", functools.partial(_backward, one))  # calibration asks which errors matter
    model = acm.rewrite(one.model, acm.plan(one.model, one.inputs, lossless=True))
    batches = masked(varied(one.inputs, seed=seed) for seed in range(_BATCHES))
    with pytest.MonkeyPatch.context() as quick:  # how good gates and budget tables are is proved elsewhere
        quick.setattr(measure, "GRID", ())
        quick.setattr(measure, "_STEPS", 1)
        calibrate_on(model, batches, options=Options(gate_steps=2))
    acm.set_k(model, max(module.count for module in acm.sites(model).values()))
    return model


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A process group of this process alone."""
    sync = tmp_path_factory.mktemp("ddp") / "sync"
    torch.distributed.init_process_group("gloo", init_method=f"file://{sync}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def of_original(one: Case, proof: str, action: Callable[[], Any]) -> Any:
    """Output of the original; a skip where it is known to raise instead."""
    known = EXCEPTIONS.get(proof, {}).get(one.entry.name)
    if known is None:
        return action()
    attempt = Attempt()
    with attempt:
        action()
    assert attempt.error is not None, f"{proof} works by now: take {one.entry.name} off the table"
    pytest.skip(known)


def rewritten(one: Case, *, init: Literal["auto", "random"] = "auto", seed: int = 3) -> nn.Module:
    """A rewritten copy."""
    plan = plan_of(one.entry.name, init=init)
    torch.manual_seed(seed)
    return acm.rewrite(one.model, plan)


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    """A number that all outputs that learn contribute to."""
    return sum((out.square().mean() for out in answers(model, inputs) if out.requires_grad), torch.zeros(()))


def gradients(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The gradients of `loss_of`, by parameter, for all that have one; they are taken off the model again."""
    loss_of(model, inputs).backward()
    found = {path: p.grad for path, p in model.named_parameters() if p.grad is not None and p.numel()}
    model.zero_grad()
    return found


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Alike for the same parameters; the largest is the measure, as keys' biases have none but rounding."""
    assert list(found) == list(expected)
    size = max(grad.abs().max() for grad in expected.values())
    assert all((found[path] - expected[path]).abs().max() <= 1e-4 * size for path in expected)


def assert_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal to the last bit."""
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def learning(model: nn.Module) -> nn.Module:
    """`model` with relaxed gates; its trunk stays in eval mode, so that no layer is dropped."""
    acm.relax(model.eval(), 0.8)
    for module in acm.sites(model).values():
        module.train()
    return model


def unlearning(model: nn.Module) -> None:
    """Undo `learning`."""
    model.zero_grad()
    acm.relax(model.eval(), None)
    acm.set_k(model, max(module.count for module in acm.sites(model).values()))


def without_gradient(model: nn.Module) -> list[str]:
    """The parameters of ACMs that the last backward pass did not reach."""
    return [
        f"{site}.{path}"
        for site, module in acm.sites(model).items()
        for path, parameter in module.named_parameters()
        if not path.startswith("dense.")
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]


def test_class_signature_and_modules_stay_and_the_original_is_untouched(one):
    before, kinds = state_of(one.model), [type(module) for module in one.model.modules()]
    model = rewritten(one)
    if one.entry.name not in EXCEPTIONS["backward"]:
        loss_of(model, one.inputs).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert type(model) is type(one.model)
    assert inspect.signature(model.forward) == inspect.signature(one.model.forward)
    assert_same_state(one.model.state_dict(), before)
    assert [type(module) for module in one.model.modules()] == kinds
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_a_fresh_rewrite_answers_as_the_original_at_another_shape(one):
    with torch.no_grad():
        inputs = of_original(one, "another shape", lambda: other_shape(one.model, one.inputs))
        assert_alike(answers(rewritten(one), inputs), answers(one.model, inputs))


def test_a_lossless_calibration_at_all_learners_answers_as_the_original(one, calibrated):
    shapes = [one.inputs]
    if one.entry.name not in EXCEPTIONS.get("another shape", {}):
        shapes.append(other_shape(one.model, one.inputs))
    with torch.no_grad():
        for inputs in shapes:
            assert_alike(answers(calibrated, inputs), answers(one.model, inputs))


@pytest.mark.parametrize("way", WAYS)
def test_generation_stays(one, way):
    if not getattr(one.model, "can_generate", bool)():
        pytest.skip("it does not generate")
    inputs = {key: value for key, value in split_inputs(one.inputs)[1].items() if not key.startswith("decoder_")}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **WAYS[way]}
    expected = of_original(one, f"generate {way}", lambda: one.model.generate(**inputs, **options))
    assert torch.equal(rewritten(one).generate(**inputs, **options), expected)


def test_gradients_reach_every_parameter_of_every_acm(one):
    of_original(one, "backward", functools.partial(_backward, one))
    model = rewritten(one, init="random")
    loss_of(learning(model), one.inputs).backward()
    assert not without_gradient(model)


def _backward(one: Case) -> None:
    loss_of(copy.deepcopy(one.model), one.inputs).backward()


def test_gradients_reach_every_parameter_after_calibration(one, calibrated):
    of_original(one, "backward", functools.partial(_backward, one))
    loss_of(learning(calibrated), one.inputs).backward()
    lost = without_gradient(calibrated)
    unlearning(calibrated)
    assert not lost


def test_training_mode_is_as_random_as_the_originals_and_eval_forgets_it(one):
    def is_random(model: nn.Module) -> bool:
        model = copy.deepcopy(model).train()
        first, *others = (answers(model, one.inputs, seed=seed) for seed in (1, 2, 3, 4))
        return any(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))

    model = rewritten(one)
    with torch.no_grad():
        expected = of_original(one, "train", lambda: is_random(one.model))
        assert is_random(model) == (expected and one.entry.name not in EXCEPTIONS["dropout"])
        before = answers(model, one.inputs)
        model.train()
        dense = {part for module in acm.sites(model).values() if module.dense for part in module.dense.modules()}
        assert all(module.training for module in model.modules() if module not in dense)
        assert_bits(answers(model.eval(), one.inputs), before)


def test_gradient_checkpointing_changes_no_gradient(one):
    of_original(one, "backward", functools.partial(_backward, one))
    model = rewritten(one, init="random").train()
    of_original(one, "train", lambda: answers(copy.deepcopy(one.model).train(), one.inputs))
    expected = gradients(model, one.inputs)
    if one.entry.name in EXCEPTIONS["checkpointing of its own"]:
        with pytest.raises((AssertionError, RuntimeError)):
            original = copy.deepcopy(one.model).train()
            assert _checkpointed(original)
            gradients(original, one.inputs)
    if one.entry.name in EXCEPTIONS["checkpointing of its own"] or not _checkpointed(model):
        model = _Checkpointed(model)
        expected = {f"model.{path}": grad for path, grad in expected.items()}
    assert_same_gradients(gradients(model, one.inputs), expected)


def _checkpointed(model: nn.Module) -> bool:
    """Turn on the checkpointing that the model's makers gave it; whether there is one."""
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        return False
    return True


class _Checkpointed(nn.Module):
    """The whole model in one checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.model, *args, use_reentrant=False, **kwargs)


def test_distributed_training_gives_the_same_gradients(one, one_process):
    of_original(one, "backward", functools.partial(_backward, one))
    model = rewritten(one, init="random").eval()
    # a copy, as some models keep a part of the graph of their first forward in eval mode
    expected = {f"module.{path}": grad for path, grad in gradients(copy.deepcopy(model), one.inputs).items()}
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    found = gradients(wrapped, one.inputs)
    assert_same_gradients({path: found[path] for path in expected}, expected)


def test_copies_and_states_answer_alike(one):
    with torch.no_grad():
        model = rewritten(one, init="random")
        expected = answers(model, one.inputs)
        assert_bits(answers(copy.deepcopy(model), one.inputs), expected)
        other = rewritten(one, init="random", seed=4)
        other.load_state_dict(model.state_dict())
        assert_bits(answers(other, one.inputs), expected)


def in_type(model: nn.Module, inputs: Any, dtype: torch.dtype) -> list[Tensor]:
    """Output of the model in `dtype`; with twice the digits that must be numbers."""
    found = answers(model.to(dtype), inputs)
    assert dtype != torch.float64 or all(out.isfinite().all() for out in found)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casts_work_where_the_originals_do(one, dtype):
    inputs = cast(one.inputs, dtype)
    with torch.no_grad():
        expected = of_original(one, str(dtype), lambda: in_type(copy.deepcopy(one.model), inputs, dtype))
        found = answers(rewritten(one).to(dtype), inputs)
        assert [out.dtype for out in found] == [out.dtype for out in expected]
        if dtype == torch.float64:
            assert_alike(found, expected)


def test_a_saved_model_comes_back_bit_by_bit(one, calibrated, tmp_path):
    acm.save(calibrated, tmp_path / "out")
    attempt, loaded = Attempt(), []
    with attempt:
        loaded.append(acm.load(tmp_path / "out"))
    if attempt.error is not None:
        assert isinstance(attempt.error, AcmError) and "base_model=" in str(attempt.error)
        loaded.append(acm.load(tmp_path / "out", base_model=one.model))
    acm.set_k(loaded[0], max(module.count for module in acm.sites(loaded[0]).values()))
    with torch.no_grad():
        assert_bits(answers(loaded[0], one.inputs), answers(calibrated, one.inputs))


def test_an_export_answers_alike(one):
    args, kwargs = split_inputs(one.inputs)
    if getattr(getattr(one.model, "config", None), "use_cache", None):
        kwargs = kwargs | {"use_cache": False}

    def exported(model: nn.Module) -> nn.Module:
        return torch.export.export(model, args, kwargs, strict=False).module()

    with torch.no_grad():
        of_original(one, "torch.export", lambda: call_model(exported(one.model), kwargs or args))
        model = rewritten(one)
        inputs = kwargs if kwargs else args
        assert_alike(answers(exported(model), inputs), answers(model, inputs))
