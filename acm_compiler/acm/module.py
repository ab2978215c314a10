"""The module that takes a site's place: gate, learners, and the dense region they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from acm_compiler.acm import context, ops, tokens
from acm_compiler.acm.arguments import Weights, held
from acm_compiler.acm.check_arguments import refuse_type, refuse_width
from acm_compiler.acm.context import Choices, Said
from acm_compiler.acm.gradients.recomputed import guard_budget
from acm_compiler.acm.intact import refuse_changed, refuse_idle, refuse_torchscript, refuse_without_dense
from acm_compiler.acm.learners import Gate, Learners, OnlyK, gumbel_noise
from acm_compiler.acm.precision import without_autocast
from acm_compiler.acm.reference import choice_costs, choose_k, prefix_output, sample_nu, utilities
from acm_compiler.acm.sparse import Skips
from acm_compiler.site import Layout

RUN_TIME = ("knob", "k_lo", "k_hi", "decode_knob", "decode_k_lo", "decode_k_hi")
COUNTS = "counts"

State = Literal["dense", "learners"]
Phase = Literal["prefill", "decode"]
Tap = Callable[["ACM", Tensor, Tensor], None]
Operator = Callable[..., Tensor]


class ACM(nn.Module):
    """Gate + N learners in a site's place; [..., D] -> [..., O], every token by itself (docs/semantics.md, The module).

    `state` "dense": no phase has fitted the learners yet and the dense region runs, counted as k = N.
    `dense` is that region, frozen; it is left out of the state dict unless `state` is "dense".
    Run-time choices are the buffers `knob` (the bits of a float32), `k_lo` and `k_hi`: written in place, never
    rebound, so that a compiled model follows them without recompiling. Inputs of one token per example
    follow `decode_knob`, `decode_k_lo` and `decode_k_hi`, which say the same unless budgets were set per phase.
    `written` holds the same numbers for graphs that Inductor freezes: they keep them, and are guarded by them. `only_k`
    says by phase which k the bounds leave to every token, if but one.
    `cost` is what one learner of this site costs in units of the model's mean site. `counts`, where a meter has put it,
    is how many tokens ran k = 0, 1, ..., N: int64 [N + 1], added to in place, in graphs too. `adapter` gives the
    weights that run, from the learners' own. `split` makes operators run on this process's part of the learners.
    `skips`, where there are any, are the small values that calls in eval mode skip. `noise` draws for sampled gates.
    """

    knob: Tensor
    k_lo: Tensor
    k_hi: Tensor
    decode_knob: Tensor
    decode_k_lo: Tensor
    decode_k_hi: Tensor
    counts: Tensor | None

    def __init__(
        self,
        gate: Gate,
        learners: Learners,
        *,
        name: str,
        k_min: int,
        layout: Layout | None,
        cost: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.gate, self.learners = gate, learners
        self.dense: nn.Module | None = None
        self.name, self.k_min, self.layout, self.cost, self.dropout = name, k_min, layout, cost, dropout
        self.d_in, self.count = gate.inner.in_features, learners.w_in.shape[0]
        self.state: State = "learners"
        self.temperature: float | None = None
        self.tap: Tap | None = None
        self.noise: Operator | None = None
        self.adapter: Callable[[Weights], Weights] | None = None
        self.split: Callable[[Operator], Operator] | None = None
        self.skips: Skips | None = None
        self.choices: list[Choices] = []
        self.conversion: Any = None
        self.replaced: Any = None  # what the graft took out, for `revert`
        self.written = {name: 0 if name.endswith("knob") else self.count for name in RUN_TIME}
        for name, start in self.written.items():
            scalar = torch.full((), start, dtype=torch.int32, device=learners.w_in.device)
            self.register_buffer(name, scalar, persistent=False)
        self.only_k = OnlyK(self.written, self.within, self._buffers)
        self.register_buffer(COUNTS, None, persistent=False)

    @property
    def layout(self) -> Layout | None:
        """Axes of the site's input along which examples and tokens lie."""
        return self._layout

    @layout.setter
    def layout(self, layout: Layout | None) -> None:
        # compiled calls guard one number, which costs less than the layout's attributes
        self._layout, self.axis_of_ones = layout, tokens.axis_of_ones(layout)

    def forward(self, x: Tensor) -> Tensor:
        # of small sites most time goes into Python: calls and searches for attributes are kept few
        run = None if torch.compiler.is_compiling() else ops.SITES.get(x.device.type)
        whole = context.fx_node(self, x) if isinstance(x, Proxy) else run and run(self, x)
        if whole is not None:
            return whole
        gate, learners = self.gate, self.learners
        refuse_changed(self.name, (gate.inner, gate.outer), learners, split=self.split is not None)
        said = context.batch_of(self.conversion)
        if said is not None:  # what nobody reads must fit, too
            tokens.check_fit(said.mask, said.knob, x.shape[:-1], self.layout_of(x.shape[:-1]), site=self.name)
        if self.tap is not None:
            return self._run_tapped(x)
        if not x.dim() or x.shape[-1] != self.d_in:
            refuse_width(x, self.d_in, site=self.name)
        if self.training:
            refuse_idle(self)
            x = guard_budget(x, self)
        if self.state == "dense":
            y = self._dense_region()(x)
            self._report(x.new_full(x.shape[:-1], self.count, dtype=torch.int32).flatten(), x)
        elif self.training and self.temperature is not None:
            y = self._run_relaxed(x, self.temperature)
        else:
            weights = learners.weights()
            weights = weights if self.adapter is None else self.adapter(weights)
            if x.dtype != weights.b_out.dtype:
                refuse_type(x, weights.b_out.dtype, site=self.name)
            x_TD = x.reshape(-1, x.shape[-1])
            k = self._k_of_graph(x, weights, said) if torch.compiler.is_compiling() else None
            k_T = self.choose(x_TD, x.shape[:-1], said) if k is None else x_TD.new_full(x_TD.shape[:1], k).int()
            if said is not None and said.skip_padding:
                k_T = tokens.skip(k_T, self.mask_of(x.shape[:-1]))
            self._report(k_T, x)
            if k is not None and not ops.is_vector_call(x_TD, weights):
                y_TO = prefix_output(x_TD, weights, k)
            elif self.skips is not None and self.skipping(x.shape[:-1]):
                y_TO = self.skips.learners(x_TD, k_T, weights)
            else:
                run_learners = ops.learners if self.split is None else self.split(ops.learners)
                y_TO = run_learners(x_TD, k_T, weights)
            y = y_TO.reshape(*x.shape[:-1], y_TO.shape[-1])
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def _k_of_graph(self, x: Tensor, weights: Weights, said: Said | None) -> int | None:
        """The k of all tokens, where a graph may run dense products of so many learners; None elsewhere."""
        plain = said is None and self.split is None and self.skips is None and not weights.is_quantized
        if not plain or not context.runs_prefixes(x.device):
            return None
        return self.only_k.of(is_decode=tokens.is_one_each(x.shape[:-1], self.axis_of_ones))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"choices": []}  # their graphs are this module's, and cannot be copied

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript(self.name)

    def train(self, mode: bool = True) -> ACM:
        super().train(mode)
        if self.dense is not None:
            self.dense.eval()  # a replaced module may hold the dropout that `forward` applies
        return self

    def choose(self, x_TD: Tensor, shape: torch.Size, said: Said | None = None) -> Tensor:
        """k of every token, int32 [T], for tokens of an input [*shape, D] of a batch that says so much."""
        if said is not None and said.knob is not None and said.k_lo is not None and said.most is not None:
            knob = self._of_examples(said.knob, shape)
            k_hi = said.most[self.count].to(self.k_lo.device).clamp(min=self.k_min)
            k_lo = self._of_examples(said.k_lo.clamp(self.k_min, self.count), shape)
            return choose_k(self.utilities(x_TD, knob), k_lo, k_hi, self.k_min)
        names = RUN_TIME[3:] if tokens.is_one_each(shape, self.axis_of_ones) else RUN_TIME[:3]
        if context.is_freezing():  # a graph that keeps what it reads: Dynamo guards on numbers, and others make another
            bits, k_lo, k_hi = (torch.full_like(self.knob, self.written[name]) for name in names)
        else:
            bits, k_lo, k_hi = held(names, self, kind="_buffers")
        knob = bits.view(torch.float32)
        if ops.gate_is_operator(x_TD):
            tensors = (x_TD, *self.gate.weights(), knob, k_lo, k_hi)
            return ops.run_gate(*tensors, cost=self.cost, k_min=self.k_min, rule=self.gate.rule)
        return choose_k(self.utilities(x_TD, knob), k_lo, k_hi, self.k_min)

    def _of_examples(self, values_B: Tensor, shape: torch.Size) -> Tensor:
        # a model may lie on several devices
        return tokens.of_examples(values_B.to(self.k_lo.device), shape, self.layout_of(shape), site=self.name)

    def utilities(self, x_TD: Tensor, knob: Tensor) -> Tensor:
        """Utilities [T, C] of the allowed k; fp32 or float64."""
        with without_autocast(x_TD.device):
            score_TC = self.gate(x_TD)
            score_TC = score_TC.double() if x_TD.dtype == torch.float64 else score_TC.float()
            return utilities(score_TC, knob, self.choice_costs(x_TD.device), self.gate.rule)

    def choice_costs(self, device: torch.device) -> Tensor:
        """c_k of every choice, [C]: k times this site's cost of a learner."""
        return choice_costs(self.cost, k_min=self.k_min, n_learners=self.count, device=device)

    def skipping(self, shape: torch.Size) -> bool:
        """True if a call with an input [*shape, D] skips small values."""
        every = self.skips is not None and self.skips.every_call
        return self.skips is not None and not self.training and (every or tokens.is_one_each(shape, self.axis_of_ones))

    def _run_relaxed(self, x: Tensor, temperature: float) -> Tensor:
        shape, x_TD = x.shape[:-1], x.reshape(-1, x.shape[-1])
        u_TC, draw = self.utilities(x_TD, self.knob.view(torch.float32)), self.noise
        nu_TC = sample_nu(u_TC, gumbel_noise(u_TC) if draw is None else draw(self, u_TC, shape), temperature)
        self._report((nu_TC.argmax(-1) + self.k_min).to(torch.int32), x)
        if torch.is_grad_enabled() and not context.recomputing():
            nu, mask = self.by_example(nu_TC, shape), self._mask(shape)
            context.keep_choices(self.choices, Choices(nu=nu, mask=mask, **context.caller_of(self.conversion)))
        run = ops.relaxed if self.split is None else self.split(ops.relaxed)
        weights = self.learners.weights()
        y_TO = run(x_TD, nu_TC, weights if self.adapter is None else self.adapter(weights), self.k_min)
        return y_TO.to(x.dtype).reshape(*shape, y_TO.shape[-1])

    def _run_tapped(self, x: Tensor) -> Tensor:
        assert self.tap is not None
        output = self._dense_region()(x)
        self.tap(self, x, output)
        # work in place on a view would cut off a gradient hook that the tap put there
        return output.clone() if output.requires_grad and output._is_view() else output

    def _dense_region(self) -> nn.Module:
        return refuse_without_dense(self.name) if self.dense is None else self.dense

    def _report(self, k_T: Tensor, x: Tensor) -> None:
        observers = context.observers_of(self.conversion)
        if (self.counts is None and not observers) or context.recomputing():
            return
        if self.counts is not None and (torch.compiler.is_compiling() or not any(context.transforms())):
            self.counts.add_(tokens.count_k(k_T, self.mask_of(x.shape[:-1]), self.count))
        if observers:
            k_BS, mask_BS = self.by_example(k_T, x.shape[:-1]), self._mask(x.shape[:-1])
            for observe in observers:
                observe(self, k_BS, mask_BS, x)

    def layout_of(self, shape: torch.Size) -> Layout | None:
        """The layout of an input [*shape, D] of the running call."""
        return tokens.fitted(self.layout, shape, self.conversion)

    def by_example(self, values_T: Tensor, shape: torch.Size) -> Tensor:
        """Values [T, ...] of the tokens of an input [*shape, D] as [batch, tokens, ...]."""
        return tokens.to_batch(values_T, shape, self.layout_of(shape), site=self.name)

    def _mask(self, shape: torch.Size) -> Tensor | None:
        mask_T = self.mask_of(shape)
        return None if mask_T is None else self.by_example(mask_T, shape)

    def mask_of(self, shape: torch.Size) -> Tensor | None:
        """The padding mask for an input [*shape, D], flat [T], True at real tokens; None when all are real."""
        layout = self.layout_of(shape)
        mask_BS = tokens.known_mask(self.conversion, shape, layout)
        return None if mask_BS is None else tokens.of_mask(mask_BS.to(self.k_lo.device), shape, layout, site=self.name)

    @property
    def knob_value(self) -> float:
        """The knob as a number."""
        return float(self.knob.view(torch.float32))

    def set_choices(self, *, knob: float, k_lo: int, k_hi: int, phase: Phase | None = None) -> None:
        """Write the run-time choices in place, of both phases or of one; the bounds are clamped to [k_min, N]."""
        bits = int(torch.tensor(knob, dtype=torch.float32, device="cpu").view(torch.int32))
        low, high = self.within(k_lo, k_hi)
        for names, other in ((RUN_TIME[:3], "decode"), (RUN_TIME[3:], "prefill")):
            if phase != other:
                self.set_run_time(dict(zip(names, (bits, low, high), strict=True)))

    def within(self, k_lo: int, k_hi: int) -> tuple[int, int]:
        """The same bounds, as far as this site can keep them: within [k_min, N]."""
        high = max(self.k_min, min(k_hi, self.count))
        return max(self.k_min, min(k_lo, high)), high

    def run_time(self) -> dict[str, int]:
        """The run-time choices by name, knobs as their bits, for `set_run_time`."""
        return {name: int(getattr(self, name)) for name in RUN_TIME}

    def set_run_time(self, values: dict[str, int]) -> None:
        """Write choices, as `run_time` gives them."""
        for name, value in values.items():
            choice = getattr(self, name)
            # inference tensors, as of a model moved in inference mode, are written to in that mode alone
            with torch.inference_mode(choice.is_inference() or torch.is_inference_mode_enabled()):
                choice.fill_(value)
        self.written = self.written | values
        self.only_k = OnlyK(self.written, self.within, self._buffers)

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        result = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.state != "dense":
            for key in [key for key in result if key.startswith(f"{prefix}dense.")]:
                del result[key]
        return result

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        # a saved ACM does not carry its dense region: what is here stays
        if self.state != "dense" and self.dense is not None:
            for key, tensor in self.dense.state_dict().items():
                state_dict.setdefault(f"{prefix}dense.{key}", tensor)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.set_run_time(self.written)  # `to_empty`, or an average over buffers, may have left other numbers
