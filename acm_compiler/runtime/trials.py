"""Trial forwards of a converted model: the share of learner MACs that its data spend at one knob.

The strongest and the weakest knob run all batches. From what these show, the share of every batch at any other knob can
be expected (`expected_share`), and the few that are run then tell by how much the others miss what is expected of them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from acm_compiler.acm import ACM, tokens
from acm_compiler.acm.context import observed
from acm_compiler.acm.intact import in_parts
from acm_compiler.errors import DataError
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.offload import trim
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.runtime import ranks
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.expected_share import (
    STRONGEST_KNOB,
    Part,
    Probe,
    Whole,
    quantiles,
    refuse_broken,
    turning_knobs,
)
from acm_compiler.runtime.usage import PADDING, Usage, recorded
from acm_compiler.sources.inputs import ForwardEnded, Inputs, call_model

_LOG = logging.getLogger(__name__)
# digits of a share that are no rounding
_DIGITS = 12
# tokens of each site, in whole examples, whose scores say where to look next
_SCORED = 4096


class Trials:
    """Forwards of one model over the same batches, knob by knob: `extremes` first, then any other by `at`."""

    count: int
    """Examples that hold a real token."""
    _whole: Whole

    def __init__(self, found: Rewritten, examples: Sequence[tuple[Inputs, Tensor | None]], k_lo: int) -> None:
        self._found, self._examples, self.k_lo = found, examples, k_lo
        self._least = found.plan.cost.least_share(k_lo)
        self._calls = defaultdict[int, list[int]](list)
        self._run_all = partial(ranks.shared, self._run, apart=not in_parts(found.model))
        # one of so many examples has its scores looked at
        self._every = 1

    def extremes(self) -> tuple[Probe, Probe]:
        """The probes of the strongest and the weakest knob, of all batches.

        Nan and infinity in data or weights show with every knob: the first one looks at the scores of all examples.
        """
        strongest, parts = self._of_all(STRONGEST_KNOB)
        self._every = max(1, sum(part.run for part in parts.values()) // _SCORED)
        weakest, parts = self._of_all(-STRONGEST_KNOB)
        self._whole = Whole(parts, weakest.knob, self._least)
        self.count = sum(len(part.shares) for part in parts.values())
        return strongest, weakest

    def at(self, knob: float) -> Probe:
        """The probe of any other knob, of as many batches as tell what all would spend.

        Its share is what is expected of all batches, and by how much those that were run differ from it.
        """
        self._set(knob)
        expected = self._whole.expected(knob)
        parts: dict[int, Part] = {}
        for number, part in zip(self._whole.order, self._run_all(self._whole.order), strict=False):
            parts[number] = part
            if self._whole.is_known_by(parts, expected):
                break
        beyond = torch.cat([part.shares - expected.get(number, 0.0) for number, part in parts.items()])
        share = self._mean(beyond) + self._mean(self._whole.of_examples(expected))
        return self._probe(knob, share, parts)

    def _of_all(self, knob: float) -> tuple[Probe, dict[int, Part]]:
        self._set(knob)
        parts = dict(enumerate(self._run_all(range(len(self._examples)))))
        share = self._mean(torch.cat([part.shares for part in parts.values()]))
        return self._probe(knob, share, parts), parts

    def _set(self, knob: float) -> None:
        for acm in self._found.acms.values():
            acm.set_choices(knob=knob, k_lo=self.k_lo, k_hi=acm.count)

    def _mean(self, shares: Tensor) -> float:
        if not len(shares):
            raise DataError(
                "the examples to measure budgets on hold no real token", fix="give batches that are not empty"
            )
        return float(shares.mean())

    def _probe(self, knob: float, share: float, parts: Mapping[int, Part]) -> Probe:
        turning = quantiles(chain.from_iterable(part.turning for part in parts.values())).numpy()
        probe = Probe(knob=knob, share=round(share, _DIGITS), turning=turning, least=self._least)
        _LOG.debug("knob %+.3f: budget %.3f, %d batches", knob, probe.share, len(parts))
        return probe

    def _run(self, number: int) -> Part:
        """Run one batch with the knob that is set; TrainingFailed where a score of a real token is not finite."""
        usage, knobs = self._forward(number)
        real = {name: k_BS != PADDING for name, k_BS in usage.k.items()}
        turning = []
        for name, knobs_BSn in knobs.items():
            knobs_Rn = knobs_BSn[real[name][:: self._every]]
            refuse_broken(name, knobs_Rn, f"batch {number + 1} of {len(self._examples)} to measure budgets on")
            turning.append((knobs_Rn.flatten().cpu(), float(macs_per_learner(self._found.plan.site(name)))))
        return Part(
            shares=usage.real_shares.cpu(),
            tokens=max(int(real_BS.sum()) for real_BS in real.values()),
            run=max(real_BS.numel() for real_BS in real.values()),
            turning=turning,
        )

    def _forward(self, number: int) -> tuple[Usage, dict[str, Tensor]]:
        """The usage of a batch, and by site the knobs [B, S, C - 1] at which every so many-th example's tokens turn.

        What comes after the last call of an ACM is not run: once two forwards have made as many calls, the next end
        there.
        """
        inputs, mask = self._examples[number]
        model, calls, before = self._found.model, defaultdict[str, list[Tensor]](list), self._calls[number]
        last = before[0] if len(before) > 1 and len(set(before)) == 1 else 0

        def see(acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
            lowest = acm.within(self.k_lo, acm.count)[0] - acm.k_min
            x_BSD = tokens.to_batch(x.reshape(-1, x.shape[-1]), x.shape[:-1], acm.layout, site=acm.name)[:: self._every]
            scores, costs = acm.gate(x_BSD.flatten(0, 1)), acm.choice_costs(x.device)
            knobs_Tn = turning_knobs(scores[:, lowest:], costs[lowest:], acm.gate.rule)
            calls[acm.name].append(knobs_Tn.unflatten(0, x_BSD.shape[:2]))
            if last and sum(map(len, calls.values())) == last:
                raise ForwardEnded

        watched = observed(self._found.owner, see)
        stopped = suppress(ForwardEnded)
        with batch_context(model, mask=mask), recorded(self._found) as usage, watched, stopped:
            call_model(model, inputs)
            before.append(sum(map(len, calls.values())))
        trim()
        return usage, {name: torch.cat(parts, dim=1) for name, parts in calls.items()}
