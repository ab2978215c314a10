"""Output channels of a packed linear that a value shows, against what the operations really pick."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.passes.capture.capture import capture
from acm_compiler.passes.find.channels import Channels, channels_of
from acm_compiler.passes.find.dataflow import build_dataflow

TOKENS, WIDTH, PACKED = (2, 3), 4, 24


class Numbered(nn.Module):
    """Channel j of the packed linear is j for every token; `pick` is applied to all of them."""

    def __init__(self, pick) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PACKED, WIDTH))
        self.bias = nn.Parameter(torch.arange(PACKED, dtype=torch.float32))
        self.pick = pick

    def forward(self, x):
        return self.pick(F.linear(x, self.weight, self.bias))


def found(pick) -> tuple[Channels | None, torch.Tensor]:
    """The channels that `pick` is seen to show, and those that it shows."""
    model, x = Numbered(pick).eval(), torch.randn(*TOKENS, WIDTH)
    flow = build_dataflow(capture(model, x))
    (output,) = flow.outputs
    return channels_of(flow, output), model(x)


PICKS = {
    "all": lambda y: y,
    "chunk": lambda y: y.chunk(3, -1)[1],
    "split in unequal parts": lambda y: y.split([6, 10, 8], dim=-1)[2],
    "slice": lambda y: y[..., 5:17],
    "every other one": lambda y: y[..., 1::2],
    "narrow": lambda y: y.narrow(-1, 3, 7),
    "the last ones": lambda y: y.narrow(-1, -7, 7),
    "heads": lambda y: y.view(*TOKENS, 4, 6),
    "one head": lambda y: y.view(*TOKENS, 4, 6)[:, :, 2],
    "unbound heads": lambda y: y.view(*TOKENS, 4, 6).unbind(2)[3],
    "interleaved": lambda y: y.reshape(*TOKENS, 12, 2)[..., 1],
    "heads joined again": lambda y: y.view(*TOKENS, 4, 6).flatten(2),
    "tokens joined": lambda y: y.view(-1, PACKED)[:, 4:8],
    "a chunk's slice": lambda y: y.chunk(2, -1)[1][..., 2:5],
    "counted from the end": lambda y: y[..., -4:],
}


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
def test_channels_are_those_that_the_operations_pick(pick):
    channels, numbers = found(pick)
    assert channels is not None
    expected = torch.tensor(float(channels.offset))
    for entries, stride in channels.tail:
        expected = expected[..., None] + stride * torch.arange(entries)
    first = numbers.reshape(-1, *expected.shape)[0]
    torch.testing.assert_close(expected, first)
    assert channels.size == first.numel()
    one_run = first.dim() == 1 and torch.equal(first.diff(), torch.ones(len(first) - 1))
    assert channels.span == ((int(first[0]), int(first[-1]) + 1) if one_run else None)


OTHERS = {
    "some tokens": lambda y: y[:, 1:, 2:4],
    "tokens and channels mixed": lambda y: y.reshape(TOKENS[0], -1),
    "joined after a gap": lambda y: y.view(*TOKENS, 4, 6)[..., 1:3].flatten(2),
    "another order": lambda y: y.flip(-1),
    "computed": lambda y: y.relu(),
    "chunks of tokens": lambda y: y.chunk(2, 0)[1],
}


@pytest.mark.parametrize("pick", OTHERS.values(), ids=OTHERS)
def test_what_is_more_than_a_packing_shows_none(pick):
    assert found(pick)[0] is None
