"""A state dict alone carries a calibrated model's budgets."""

import copy
import io

import pytest
import torch

import acm_compiler as acm
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.passes.rewrite.saving_hooks import KEY
from tests.helpers.rewrite_cases import ALL, answer, give_budgets, rewritten


def measured(case: str = "parallel"):
    """(model before the rewrite, input, its conversion with a budget table, all sites on their learners)."""
    model, x, copied = rewritten(ALL[case])
    give_budgets(copied)
    for module in acm.sites(copied).values():
        torch.nn.init.normal_(module.gate.outer.weight)
    return model, x, copied


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("prefix", ["", "inner."])
def test_budgets_come_back_with_the_weights(prefix):
    model, x, copied = measured()
    fresh = acm.rewrite(model, conversion(copied).plan)
    source, target = (torch.nn.ModuleDict({"inner": m}) if prefix else m for m in (copied, fresh))
    state = {name: tensor.clone() for name, tensor in through_a_file(source.state_dict()).items()}
    assert state[prefix + KEY].dtype == torch.uint8
    target.load_state_dict(state)
    owner, again = conversion(copied), conversion(fresh)
    assert (again.table, again.default_budget, again.damage) == (owner.table, 0.6, owner.damage)
    for converted in (copied, fresh):
        acm.set_budget(converted, 0.3)
    assert torch.equal(answer(fresh, x), answer(copied, x))


def test_a_model_without_a_table_has_a_state_dict_of_weights_alone():
    model, _, copied = rewritten(ALL["parallel"])
    assert KEY not in copied.state_dict()
    fresh = acm.rewrite(model, conversion(copied).plan)
    conversion(fresh).table = conversion(measured()[2]).table
    fresh.load_state_dict(copied.state_dict())
    assert conversion(fresh).table is not None


def test_copies_and_reverted_models_know_their_own_tables():
    model, _, copied = measured()
    twin = copy.deepcopy(copied)
    conversion(twin).table = None
    assert KEY in copied.state_dict() and KEY not in twin.state_dict()
    twin.load_state_dict(copied.state_dict())
    assert conversion(twin).table == conversion(copied).table
    assert acm.revert(twin).state_dict().keys() == model.state_dict().keys()
    assert not twin._load_state_dict_pre_hooks and not twin._state_dict_hooks


def test_a_table_of_other_sites_or_of_a_newer_format_is_refused():
    _, _, copied = measured()
    state = copied.state_dict()
    text = bytes(state[KEY].tolist()).decode()
    name = next(iter(acm.sites(copied)))
    for old, new, said in ((f'"{name}"', '"elsewhere"', "other sites"), ('"format": 1', '"format": 2', "format 2")):
        odd = torch.tensor(list(text.replace(old, new).encode()), dtype=torch.uint8)
        with pytest.raises(RuntimeError, match=said):
            copied.load_state_dict(state | {KEY: odd})


# torch 2.11's own loading of exported programs
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_models_with_a_table_are_exported_and_called_functionally():
    _, x, copied = measured()
    acm.set_budget(copied, 0.3)
    expected = answer(copied, x)
    with torch.no_grad():
        program = torch.export.export(copied, (x,))
        torch.testing.assert_close(program.module()(x), expected)
        torch.testing.assert_close(torch.func.functional_call(copied, copied.state_dict(), (x,)), expected)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), expected)
