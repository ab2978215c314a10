"""A rewritten model of the zoo works wherever the original did: one test per thing that users do with a model.

Where the original itself refuses, as some models do to be exported, there is nothing to keep.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.inputs import split_inputs
from acm_compiler.passes.capture import Attempt
from tests.rewrite_cases import assert_same_state, state_of
from tests.zoo.cases import Case, answers, assert_alike, case, every, plan_of
from tests.zoo.catalogue import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models' makers
CONVERTIBLE = [name for name, model in MODELS.items() if model.sites]
each_model = pytest.mark.parametrize("name", every("zoo_proofs", CONVERTIBLE))


def tried(action: Callable[[], Any]) -> Any:
    """What the original does, or a skip where it raises."""
    attempt, results = Attempt(), []
    with attempt:
        results.append(action())
    if not results:
        pytest.skip(f"the original raises {type(attempt.error).__name__}: {str(attempt.error).splitlines()[:1]}")
    return results[0]


def rewritten(one: Case, *, init: Literal["auto", "random"] = "auto", seed: int = 3) -> nn.Module:
    """A rewritten copy."""
    plan = plan_of(one.entry.name, init=init)
    torch.manual_seed(seed)
    return acm.rewrite(one.model, plan)


def loss_of(model: nn.Module, one: Case) -> Tensor:
    """A number that all outputs that learn contribute to."""
    return sum((out.square().mean() for out in answers(model, one.inputs) if out.requires_grad), torch.zeros(()))


@each_model
def test_class_signature_and_modules_stay_and_the_original_is_untouched(name):
    one = case(name)
    before, kinds = state_of(one.model), [type(module) for module in one.model.modules()]
    model = rewritten(one)
    loss_of(model, one).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert type(model) is type(one.model)
    assert inspect.signature(model.forward) == inspect.signature(one.model.forward)
    assert_same_state(one.model.state_dict(), before)
    assert [type(module) for module in one.model.modules()] == kinds
    assert all(parameter.grad is None for parameter in one.model.parameters())


@each_model
def test_generation_stays(name):
    one = case(name)
    if not getattr(one.model, "can_generate", bool)():
        pytest.skip("it does not generate")
    inputs = {key: value for key, value in split_inputs(one.inputs)[1].items() if not key.startswith("decoder_")}
    model = rewritten(one)
    common = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ways = [{}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}]
    expected = [tried(lambda: one.model.generate(**inputs, **common))]
    for way in ways:
        attempt = Attempt()
        with attempt:
            expected = [one.model.generate(**inputs, **common, **way)]
        if attempt.error is None:
            assert torch.equal(model.generate(**inputs, **common, **way), expected[0]), way


@each_model
def test_gradients_reach_every_parameter_of_every_acm(name):
    one = case(name)
    unknown = [site.name for site in one.plan.sites if site.layout is None]
    if unknown:
        pytest.skip(f"gates are not relaxed where the batch cannot be told from tokens: {unknown[0]}")
    tried(lambda: loss_of(copy.deepcopy(one.model), one).backward())
    model = rewritten(one, init="random").eval()
    acm.relax(model, 0.8)
    for module in acm.sites(model).values():
        module.train()  # the trunk stays in eval: no layer is dropped
    loss_of(model, one).backward()
    lost = [
        f"{site}.{path}"
        for site, module in acm.sites(model).items()
        for path, parameter in module.named_parameters()
        if not path.startswith("dense.") and (parameter.grad is None or not parameter.grad.isfinite().all())
    ]
    assert not lost


@each_model
def test_copies_states_and_casts_answer_alike(name):
    one = case(name)
    with torch.no_grad():
        model = rewritten(one, init="random")
        expected = answers(model, one.inputs)
        assert_bits(answers(copy.deepcopy(model), one.inputs), expected)
        other = rewritten(one, init="random", seed=4)
        other.load_state_dict(model.state_dict())
        assert_bits(answers(other, one.inputs), expected)
        halves = _halved(one.inputs)
        tried(lambda: answers(copy.deepcopy(one.model).bfloat16(), halves))
        kinds = {out.dtype for out in answers(copy.deepcopy(one.model).bfloat16(), halves)}
        assert {out.dtype for out in answers(model.bfloat16(), halves)} == kinds


def assert_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal to the last bit."""
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _halved(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.bfloat16() if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {key: _halved(value) for key, value in inputs.items()}
    return tuple(map(_halved, inputs))


@each_model
def test_gradient_checkpointing_changes_no_gradient(name):
    one = case(name)
    model = rewritten(one, init="random").train()
    loss_of(model, one).backward()
    expected = {path: p.grad for path, p in model.named_parameters() if p.grad is not None and p.numel()}
    model.zero_grad()
    if hasattr(model, "gradient_checkpointing_enable"):
        tried(lambda: copy.deepcopy(one.model).gradient_checkpointing_enable())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(model, "set_grad_checkpointing"):
        tried(lambda: copy.deepcopy(one.model).set_grad_checkpointing())
        model.set_grad_checkpointing()
    else:
        pytest.skip("it has no gradient checkpointing of its own")
    loss_of(model, one).backward()
    found = {path: p.grad for path, p in model.named_parameters() if p.grad is not None and p.numel()}
    assert list(found) == list(expected)
    # the largest gradient is the measure: keys' biases have none but rounding
    size = max(grad.abs().max() for grad in expected.values())
    assert all((found[path] - expected[path]).abs().max() <= 1e-4 * size for path in expected)


@each_model
def test_an_export_answers_alike(name):
    one = case(name)
    args, kwargs = split_inputs(one.inputs)
    if getattr(getattr(one.model, "config", None), "use_cache", None):
        kwargs = kwargs | {"use_cache": False}

    def exported(model: nn.Module) -> nn.Module:
        return torch.export.export(model, args, kwargs, strict=False).module()

    with torch.no_grad():
        tried(lambda: exported(one.model))
        model = rewritten(one)
        inputs = kwargs if kwargs else args
        assert_alike(answers(exported(model), inputs), answers(model, inputs))
