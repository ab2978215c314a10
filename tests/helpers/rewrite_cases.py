"""Models to rewrite, each with inputs, and what comes out of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, Conversion, conversion
from acm_compiler.planning.plan import Plan
from tests.helpers import models

Case = Callable[[], tuple[nn.Module, Tensor]]


def _stacked(*blocks: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    return models.Stack(*(block() for block in blocks)), models.example()


PUBLISHED: dict[str, Case] = {
    "torchvision_vit": models.torchvision_vit,
    "hf_vit": models.hf_vit,
    "hf_bert": models.hf_bert,
    "hf_wav2vec2": models.hf_wav2vec2,
    "hf_gpt2": models.hf_gpt2,
    "hf_llama": models.hf_llama,
    "encoder": functools.partial(models.torch_encoder, batch_first=True),
    "encoder_tokens_first": functools.partial(models.torch_encoder, batch_first=False),
}
WRITTEN: dict[str, Case] = {
    "fused_qkv": functools.partial(_stacked, models.FusedQkv),
    "einsum": functools.partial(_stacked, models.Einsum),
    "functional": functools.partial(_stacked, models.Functional, models.Functional),
    "chunked_glu": functools.partial(_stacked, models.ChunkedGlu),
    "swiglu": functools.partial(_stacked, models.SwiGlu),
    "parallel": functools.partial(_stacked, models.Parallel),
    "post_norm": functools.partial(_stacked, lambda: models.PostNorm(models.Mlp())),
    "layer_scale": functools.partial(_stacked, lambda: models.LayerScale(models.Mlp())),
    "branch_norm": functools.partial(_stacked, lambda: models.BranchNorm(models.Mlp())),
    "shared": lambda: (models.shared_block(), models.example()),
}
ALL = PUBLISHED | WRITTEN


def trained(case: Case) -> tuple[nn.Module, Tensor]:
    """The model in eval mode with no parameter at its usual start (zero biases hide faults), and its input."""
    torch.manual_seed(0)
    model, x = case()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval(), x


def answer(model: nn.Module, x: Tensor) -> Tensor:
    """The model's main output."""
    result = model(x)
    return result if isinstance(result, Tensor) else result.logits


def planned(case: Case, **options) -> tuple[nn.Module, Tensor, Plan]:
    """A trained model, its input, and its plan; the model is the caller's own."""
    model, x, plan = _planned(case, tuple(options.items()))
    return copy.deepcopy(model), x, plan


@functools.cache
def _planned(case: Case, options: tuple) -> tuple[nn.Module, Tensor, Plan]:
    model, x = trained(case)
    return model, x, acm.plan(model, x, **dict(options))


def rewritten(case: Case, **options) -> tuple[nn.Module, Tensor, nn.Module]:
    """A trained model, its input, and a rewritten copy."""
    model, x, plan = planned(case, **options)
    return model, x, acm.rewrite(model, plan)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all that is in the state dict."""
    return copy.deepcopy(model.state_dict())


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names in the same order, same bits."""
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5 of the largest value."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def give_budgets(converted: nn.Module) -> Conversion:
    """Put all sites of `converted` on their learners, under a budget table of three rows; gives its conversion."""
    owner = conversion(converted)
    points = tuple(BudgetPoint(share=s, knob=knob, k_lo=0) for s, knob in ((0.2, 1.5), (0.6, 0.5), (1.0, -9.0)))
    owner.table, owner.default_budget = BudgetTable(rule="damage", points=points, examples=64), 0.6
    owner.damage = {name: (0.5, 0.25) for name in acm.sites(converted)}
    for module in acm.sites(converted).values():
        module.state, module.gate.rule = "learners", "damage"
    return owner
