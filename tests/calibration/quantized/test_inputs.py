"""Tokens that are kept for rounding: real ones alone, with the learners that ran, of sites and of linears."""

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.calibration.quantized.inputs import Inputs, read_inputs
from acm_compiler.errors import DataError, TrainingFailed
from acm_compiler.passes.rewrite.conversion import wholly_rewritten
from acm_compiler.progress import Progress
from tests.helpers.tour_model import TOKENS, WIDTH, Classifier


class Masked(nn.Module):
    """A block of tokens whose padding its call names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.mlp(x)
        return (self.q(x) + self.k(x)) * attention_mask[..., None]


def read(model, examples, linears=(), count=100):
    found = wholly_rewritten(model, "a test")
    modules = {name: model.get_submodule(name) for name in linears}
    return read_inputs(found, examples, modules, count=count, progress=Progress("test", shown=False))


def converted(model, example, **options):
    torch.manual_seed(0)
    return acm.rewrite(model.eval(), acm.plan(model, example, init="random", **options))


def test_padding_is_left_out_and_neighbours_share_what_is_kept():
    torch.manual_seed(0)
    x, mask = torch.randn(3, 5, WIDTH), torch.arange(5) < torch.tensor([[5], [2], [0]])
    batch = {"x": x, "attention_mask": mask.long()}
    model = converted(Masked(), batch, sites=("mlp",))
    inputs = read(model, [(batch, None)], ("first", "q", "k"))
    (site,) = acm.sites(model)
    assert {name: one.seen for name, one in inputs.items()} == dict.fromkeys((site, "first", "q", "k"), 7)
    assert torch.equal(inputs["first"].x, x[mask].bfloat16().float())
    assert inputs["q"]._x[0].data_ptr() == inputs["k"]._x[0].data_ptr() and inputs["q"].k.unique().tolist() == [1]
    assert inputs[site].k.unique().tolist() == [4]  # the first batch runs all learners


def test_batches_run_fewer_and_fewer_learners_in_turn_and_choices_come_back():
    batches = [torch.randn(2, TOKENS, WIDTH) for _ in range(4)]
    model = converted(Classifier(), batches[0])
    acm.set_k(model, 3)
    inputs = read(model, [(batch, None) for batch in batches], count=1_000)
    for site in inputs.values():
        assert site.k.unique().tolist() == [1, 2, 3, 4] or site.k.unique().tolist() == [1, 2, 3, 4][: site.k.max()]
    assert all(int(one.k_lo) == int(one.k_hi) == 3 for one in acm.sites(model).values())


def test_no_more_than_is_wanted_is_kept():
    inputs = Inputs(5)
    for _ in range(3):
        inputs.add(torch.randn(4, 2), torch.ones(4))
    assert inputs.x.shape == (5, 2) and inputs.k.shape == (5,) and inputs.seen == 12


def test_linears_that_nothing_reaches_are_left_out():
    batch = torch.randn(2, TOKENS, WIDTH)
    model = Classifier()
    model.idle = nn.Linear(4, 4)
    model = converted(model, batch, sites=("mlp",))
    assert "idle" not in read(model, [(batch, None)], ("idle", "head"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_named(value):
    batch = torch.randn(2, TOKENS, WIDTH)
    model = converted(Classifier(), batch, sites=("mlp",))
    with pytest.raises(TrainingFailed, match="not finite"):
        read(model, [(batch.index_fill(2, torch.tensor([3]), value), None)])


def test_padding_alone_is_refused():
    batch = {"x": torch.randn(3, 5, WIDTH), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    model = converted(Masked(), batch, sites=("mlp",))
    with pytest.raises(DataError, match="never saw a token"):
        read(model, [(batch | {"attention_mask": torch.zeros(3, 5, dtype=torch.long)}, None)])
