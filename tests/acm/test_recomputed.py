"""Checkpoints around ACMs whose budget changes between forward and backward."""

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import acm_compiler as acm
from acm_compiler.errors import UsageError
from tests.helpers.build import planned_site, stack_of


def in_training(temperature):
    model = stack_of(planned_site("mlp"))
    acm.relax(model.train(), temperature)
    return model, torch.randn(3, 5, 8, requires_grad=True)


@pytest.mark.parametrize("temperature", [None, 0.8])
def test_a_budget_that_changes_before_the_recomputation_is_refused(temperature):
    model, x = in_training(temperature)
    acm.set_k(model, 2)
    y = checkpoint(model, x, use_reentrant=False)
    acm.set_k(model, 1)
    with pytest.raises(UsageError, match="changed between a checkpointed forward and its backward"):
        y.sum().backward()


@pytest.mark.parametrize("temperature", [None, 0.8])
def test_other_hooks_on_what_is_saved_let_the_budget_change(temperature):
    model, x = in_training(temperature)
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        acm.set_k(model, 2)
        with save_on_cpu() if hooked else torch.enable_grad():
            y = model(x)
        acm.set_k(model, 1)
        found.append(torch.autograd.grad(y.sum(), x)[0])
    torch.testing.assert_close(found[0], found[1])
