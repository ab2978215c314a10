"""`acm.record`: which tokens ran how many learners, and what that cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from acm_compiler.acm import ACM, tokens
from acm_compiler.acm.context import called, observed, only
from acm_compiler.acm.intact import refuse_empty
from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.sparse import kept_share
from acm_compiler.errors import NothingRecorded, UsageError, check_bool, counted
from acm_compiler.passes.find.count_macs import Work
from acm_compiler.passes.rewrite.conversion import Rewritten, refuse_compiled, rewritten
from acm_compiler.planning.cost import by_example, dense_macs_per_token, gate_macs_per_token, learner_macs
from acm_compiler.planning.cost_table import unit_of
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.count_dense_work import kept_work_watched, real_work
from acm_compiler.runtime.masks import CallPadding, Lengths, Side, lengths_of

PADDING = -1


class Usage:
    """Learners and MACs run by the forwards inside one `acm.record`.

    `k` maps a site's name to an int tensor [batch, tokens], -1 at padded positions. Where its tokens cannot be told
    apart by example (patches of images) that is [1, tokens], and their MACs are shared out alike among examples.
    Repeated calls are taken for calls on the same examples: they follow each other along the token axis, and their MACs
    add up. `masked` tells whether a padding mask was known, `counted` whether MACs are, `is_here` whether a call is one
    of those recorded.
    """

    is_here: Callable[[], bool]

    def __init__(self, plan: Plan, padding: CallPadding) -> None:
        self._plan, self.counted = plan, False
        self._calls: dict[str, list[Tensor]] = {}
        self._run: dict[str, list[Tensor]] = {}
        self._lengths: dict[Side | None, Lengths] = {}
        self._padding = padding
        self._examples: int | None = None
        self._packed = False
        self._decoder = padding.decoder
        self._kept: list[int | Tensor] = []
        self.masked = False

    def observe(self, acm: ACM, k_BS: Tensor, mask_BS: Tensor | None, x: Tensor) -> None:
        """Add one call of one ACM."""
        side = self._decoder.side
        if mask_BS is None and tokens.keeps_order(acm.layout, x.shape[:-1]):
            mask_BS = self._padding.mask_of(k_BS.shape)
        examples = self._padding.examples() or len(k_BS)
        self._examples = examples if self._examples in (None, examples) else 0  # calls of several sizes: unknown
        self._packed |= acm.layout is not None and acm.layout.is_packed
        self._lengths.setdefault(side, {}).setdefault(k_BS.shape[1], mask_BS)
        if mask_BS is not None:
            self.masked = True
            k_BS = torch.where(mask_BS.to(k_BS.device), k_BS, PADDING)
        calls = self._calls.setdefault(acm.name, [])
        if calls and calls[0].shape[0] != k_BS.shape[0]:
            raise UsageError(
                "batches of different sizes in one record",
                where=acm.name,
                found=k_BS.shape[0],
                expected=calls[0].shape[0],
                fix="open one acm.record per batch",
            )
        calls.append(k_BS.detach())
        self._run.setdefault(acm.name, []).append(_learners_run(acm, k_BS.detach(), x))

    def end_call(self, works: Mapping[Side | None, list[Work]]) -> None:
        """Add what one call of the model, or of a part of it, did outside the ACMs, by whose tokens it was done for."""
        seen, self._lengths = self._lengths, {}
        own, others = dict(seen.get("own", {})), dict(seen.get(None, {}))
        if "own" in works:
            own, others = self._decoder.own | own, self._decoder.memory | others
        masks = [mask for mask in (*own.values(), *others.values()) if mask is not None]
        if len({len(mask) for mask in masks}) != 1:
            self._kept.append(sum(work.macs for part in works.values() for work in part))
            return
        batch, given = masks[0].shape[0], self._padding.given_BR
        if given is not None and given.shape[0] == batch:
            others.setdefault(given.shape[1], given)
        for side, part in works.items():
            lengths = lengths_of(side, own, others)
            self._kept.append(real_work(part, lengths, batch=batch, others_real=self._packed))

    @property
    def k(self) -> dict[str, Tensor]:
        """Learners run per site, [batch, tokens]; NothingRecorded when no forward was seen."""
        if not self._calls:
            fix = "call the model inside: with acm.record(model) as usage: model(...)"
            raise NothingRecorded("no forward of the model ran inside acm.record", fix=fix)
        return {name: torch.cat(calls, dim=1) for name, calls in self._calls.items()}

    def load(self, tokens: int | None = None) -> Tensor:
        """Share of learners run at each place of a sequence: float [batch, tokens] on the CPU, nan at padding.

        k / N, the mean over the sites that see `tokens` tokens per call (unset: as most sites do) and over their
        calls. Frames of a clip and tokens of a text are such places. NothingRecorded without a site of that kind.
        """
        loads: dict[int, list[Tensor]] = {}
        for name, k_BS in self.k.items():
            site = self._plan.site(name)
            if k_BS.shape[1] % site.calls == 0:
                share = torch.where(k_BS == PADDING, torch.nan, k_BS.float() / site.learners).cpu()
                loads.setdefault(k_BS.shape[1] // site.calls, []).append(share.unflatten(1, (site.calls, -1)).mean(1))
        if tokens is None and loads:
            tokens = max(loads, key=lambda count: len(loads[count]))
        if tokens not in loads:
            raise NothingRecorded("no site saw sequences of that length", found=sorted(loads), expected=tokens)
        return torch.stack(loads[tokens]).mean(0)

    @property
    def shares(self) -> Tensor:
        """Share of learner MACs of each example, float64 [batch]; padding left out (b_i of docs/semantics.md, Budgets).

        nan for an example of padding alone, which has no share.
        """
        run, full = self.learner_macs
        return run / full

    @property
    def budget(self) -> float:
        """The budget reached: the mean over examples, but those of padding alone, of their shares of learner MACs.

        nan where there are no others.
        """
        return float(self.real_shares.mean())

    @property
    def real_shares(self) -> Tensor:
        """`shares` without the examples that hold no real token."""
        return self.shares[~self.shares.isnan()]

    @property
    def pooled_budget(self) -> float:
        """The share of learner MACs over all tokens of the batch together; nan without real tokens."""
        run, full = self.learner_macs
        return float(run.sum() / full.sum())

    @property
    def macs(self) -> Tensor:
        """MACs of the whole model for each example, gates included, float64 [batch]; padding left out.

        What stays dense counts as it ran: by the example's own length, and in a decoder by what its cache holds.
        """
        run, _ = self.learner_macs
        return self.kept_macs + self._per_token(gate_macs_per_token) + run

    @property
    def dense_macs(self) -> Tensor:
        """MACs of the dense model in the same calls, for each example, float64 [batch]; padding left out."""
        return self.kept_macs + self._per_token(dense_macs_per_token)

    @property
    def model_share(self) -> float:
        """The MACs of all examples over the dense model's."""
        return float(self.macs.sum() / self.dense_macs.sum().clamp_min(1))

    @property
    def kept_macs(self) -> Tensor:
        """MACs of what stays dense, for each example, float64 [batch]; padding left out."""
        if not self.counted:
            raise NothingRecorded("this record left out what stays dense", fix="acm.record(model), without macs=False")
        batch = self._batch
        kept = torch.zeros(batch, dtype=torch.float64, device="cpu")
        for macs in self._kept:
            kept += macs if isinstance(macs, Tensor) else macs / max(batch, 1)
        return kept

    def _per_token(self, macs: Callable[[PlannedSite], int]) -> Tensor:
        """`macs` of every real token's site, added up for each example."""
        batch, total = self._batch, torch.zeros(self._batch, dtype=torch.float64, device="cpu")
        for name, k_BS in self.k.items():
            total += by_example(to_float64((k_BS != PADDING).sum(1)).cpu(), batch) * macs(self._plan.site(name))
        return total

    def __str__(self) -> str:
        """The budget reached, and a row for every site."""
        if not self._calls:
            return "usage: no forward recorded yet"
        if not len(self.shares):
            return "usage: no example recorded yet: the calls were of empty batches"
        rows = []
        for name, k_BS in self.k.items():
            real = k_BS[k_BS != PADDING].float()
            mean = f"{float(real.mean()):.2f}" if real.numel() else "-"
            rows.append([name, mean, self._plan.site(name).learners, real.numel()])
        head = f"budget {self.budget:.3f} reached over {counted(len(self.real_shares), 'example')}"
        if self.counted:
            macs = float(self.macs[~self.shares.isnan()].mean())
            unit, scale = unit_of(macs)
            head += f": {macs / scale:.2f} {unit} per example, {self.model_share:.0%} of the dense model"
        return f"{head}\n{tabulate(rows, headers=['site', 'mean k', 'N', 'tokens'], disable_numparse=True)}"

    def __repr__(self) -> str:
        return f"<Usage of {counted(len(self._plan.sites), 'site')}: {str(self).partition(chr(10))[0]}>"

    @property
    def learner_macs(self) -> tuple[Tensor, Tensor]:
        """Learner MACs run and those at k = N, each float64 [batch]; UsageError where sites saw several batch sizes."""
        batch, runs = self._batch, []
        for name, k_BS in self.k.items():
            real = k_BS != PADDING
            run_B = (torch.cat(self._run[name], dim=1) * real).sum(1)
            run_B, real_B = (by_example(to_float64(values_B).cpu(), batch) for values_B in (run_B, real.sum(1)))
            runs.append((self._plan.site(name), run_B, real_B))
        return learner_macs(runs)

    @property
    def _batch(self) -> int:
        """The number of examples; UsageError where sites saw several batch sizes."""
        layouts = {site.name: site.layout for site in self._plan.sites}
        sizes = {len(k_BS): name for name, k_BS in self.k.items() if (at := layouts[name]) and not at.is_pooled}
        if len(sizes) > 1:
            raise UsageError(
                "the parts of this model saw batches of different sizes, so nothing adds up by example",
                found=", ".join(f"{name}: {size}" for size, name in sizes.items()),
                fix="usage.k holds what each site ran; else give all parts as many examples (generate(): no beams), or "
                "plan with examples of several images where there are such: acm.plan(model, example_inputs)",
            )
        return next(iter(sizes), (self._packed and self._examples) or 1)


def _learners_run(acm: ACM, k_BS: Tensor, x: Tensor) -> Tensor:
    """k, or the part of k learners that is left where small values are skipped; [batch, tokens]."""
    if acm.skips is None or not acm.skipping(x.shape[:-1]):
        return k_BS
    x_BSD = acm.by_example(x.reshape(-1, x.shape[-1]), x.shape[:-1])
    k_T = k_BS.flatten().clamp(min=0)
    left_T = kept_share(x_BSD.flatten(0, 1), k_T, acm.learners.weights(), acm.skips.thresholds)
    return (k_T * left_T).view(k_BS.shape)


def record(model: nn.Module, *, macs: bool = True) -> AbstractContextManager[Usage]:
    """While open, every forward of `model` in this thread or task adds to the `Usage` it yields.

    Nothing stays on the model afterwards; what other threads run is theirs to record.
    macs=False looks at learners alone, which takes less time: `Usage.macs` and `dense_macs` are then refused. Else
    all that is compiled runs as eager code meanwhile, in every thread, so that what it does can be counted.
    CompiledModelError for a compiled model, whose graphs cannot be observed.
    """
    check_bool(macs, "macs")
    refuse_compiled(model, "recorded", fix="record the eager model: acm.record(compiled._orig_mod)")
    found = rewritten(model)
    refuse_empty(found.acms)
    return _counted(found) if macs else recorded(found)


@contextmanager
def recorded(found: Rewritten) -> Iterator[Usage]:
    """`record` of learners alone, for a model that is not compiled, whose ACMs are known."""
    padding = CallPadding(found.model)
    usage = Usage(found.plan, padding)

    def observe(acm: ACM, *what: Any) -> None:
        if acm.name in found.acms:  # the model may be a part
            usage.observe(acm, *what)

    with observed(found.owner, observe) as usage.is_here, called(found.owner, padding.examples), ExitStack() as hooks:
        for handle in padding.watch(lambda hook: only(usage.is_here, hook)):
            hooks.callback(handle.remove)
        yield usage


@contextmanager
def _counted(found: Rewritten) -> Iterator[Usage]:
    """`recorded`, and what stays dense is counted."""
    with recorded(found) as usage:
        usage.counted, here = True, usage.is_here
        with kept_work_watched(found.model, usage.end_call, side=lambda: usage._decoder.side, when=here):
            yield usage
