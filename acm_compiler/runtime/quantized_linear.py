"""Linears outside of ACMs with quantised weights: those of a model that can be, and the module that replaces one.

One is computed as a learner that every token runs (docs/semantics.md, Int8 learners), by the same kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from acm_compiler.acm import ACM, ops
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.check_arguments import refuse_type, refuse_width
from acm_compiler.acm.precision import autocast_type
from acm_compiler.acm.quantized import int8, integers
from acm_compiler.errors import SelectionError, nearest
from acm_compiler.passes.capture.normalize import disable_fast_path, normalize, normalized, replace_children
from acm_compiler.passes.find.skips import CLASSIFIER, ROUTER
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.planning.plan import Plan
from acm_compiler.planning.planner import matches_name


class QuantizedLinear(nn.Module):
    """A linear x [..., D] -> [..., O] with int8 weights `values` [O, D] and their float32 `scales` [O], or 4-bit ones.

    These are `values` [O, D / 2] with float16 `scales` [O, groups, 2] (docs/semantics.md, Int4 learners). Rows of x are
    rounded as they come, by their own range or by group; `biases` [2, O] holds zeros and the bias. Gradients
    reach x, as if nothing were rounded; weights have none. Raises UsageError for another width or type of x.
    """

    values: Tensor
    scales: Tensor
    biases: Tensor

    def __init__(self, made: Weights, *, name: str) -> None:
        """Hold the one quantised learner `made` (`one_learner_of`); `name` is for messages."""
        super().__init__()
        assert made.s_in is not None
        self.name = name
        values_OD, biases_2O = made.w_in[0, :, 0], made.b_out
        self.out_features, self.in_features = len(values_OD), values_OD.shape[1] * (2 if made.is_int4 else 1)
        scales = made.s_in.squeeze(0) if made.is_int4 else made.s_in
        for key, tensor in (("values", values_OD), ("scales", scales), ("biases", biases_2O)):
            self.register_buffer(key, tensor.detach())

    @property
    def weight(self) -> Tensor:
        """The floats [O, D] that the values stand for, for code that reads the weight itself."""
        return integers.dequantized(self._weights()).w_in[0, :, 0]

    @property
    def bias(self) -> Tensor:
        """The bias [O], zeros where the dense linear had none."""
        return self.biases[1]

    def forward(self, x: Tensor) -> Tensor:
        """x w^T + b."""
        if x.shape[-1] != self.in_features:
            refuse_width(x, self.in_features, site=self.name)
        if x.dtype != self.biases.dtype and autocast_type(x.device) is None:
            refuse_type(x, self.biases.dtype, site=self.name)
        x_TD = x.reshape(-1, self.in_features)
        k_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.int32)
        return ops.learners(x_TD, k_T, self._weights()).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, as `nn.Linear` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _weights(self) -> Weights:
        scales = self.scales if self.scales.dim() == 1 else self.scales[None]
        return _one_learner(self.values, scales, self.biases)

    def _apply(self, fn, recurse=True):
        """Keep the type of scales, where others change a module's."""
        scales = {"scales": self.scales}
        super()._apply(fn, recurse)
        integers.restore_scales(self, scales)
        return self


def one_learner_of(linear: Any) -> Weights:
    """A linear's weight, and its bias, zeros where it has none, as one learner."""
    weight = (linear.weight.T if _is_conv1d(linear) else linear.weight).detach()
    biases = weight.new_zeros(2, len(weight))
    if linear.bias is not None:
        biases[1] = linear.bias.detach()
    return _one_learner(weight, None, biases)


def _one_learner(weight: Tensor, scales: Tensor | None, biases: Tensor) -> Weights:
    """One learner, a slice of the whole input."""
    return Weights(
        w_in=weight[None, :, None], b_in=None, w_up=None, b_up=None, w_out=None, b_out=biases, w_top=None,
        s_in=scales, act="identity", form="cols",
    )  # fmt: skip


def choose_rest(found: Rewritten, include: Sequence[str], exclude: Sequence[str], to: integers.To) -> list[str]:
    """The names of the linears outside of ACMs that are quantised.

    All but the model's output heads and routers of experts, whose errors cost most, linears with tied or computed
    weights, and those with hooks, or, of 4 bits, an odd number of inputs; of heads, routers and tied ones also those
    that a pattern of `include` matches; none that one of `exclude` does. Patterns are names, globs, or `re:` and a
    regular expression. SelectionError for one that matches no linear. Packed attentions are seen as unpacked ones, with
    q_proj, k_proj, v_proj and out_proj.
    """
    with normalized(found.model) as model:
        able = {name: linear for name, linear in _outside(model, found.plan) if _is_able(linear, to)}
        tied = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        kept = {name for name, linear in able.items() if tied[id(linear.weight)] > 1} | _heads(model, found.plan)
    wanted = [name for name in able if name not in kept or _matches_any(name, include)]
    for pattern in (*include, *exclude):
        if not any(matches_name(pattern, name) for name in able):
            alike = ", ".join(nearest(pattern, list(able), least=0.0))
            raise SelectionError(f"no linear outside of ACMs matches {pattern!r}", fix=alike and f"nearest: {alike}")
    return [name for name in wanted if not _matches_any(name, exclude)]


def replace_linears(
    model: nn.Module, names: Iterable[str], to: integers.To = "int8", made: Mapping[str, Weights] | None = None
) -> None:
    """Put quantised linears in the place of these, in place, at every path that they have.

    made: their integers, by name; where there are none, weights are rounded to nearest.
    """
    names, ready = list(names), made or {}
    normalize(model, only=names)
    replaced: dict[nn.Module, nn.Module] = {}
    for name in names:
        linear = model.get_submodule(name)
        weights = ready.get(name) or integers.quantized(one_learner_of(linear), to)
        replaced[linear] = QuantizedLinear(weights, name=name).train(linear.training)
    replace_children(model, replaced)
    disable_fast_path(model, around=names)


def _outside(model: nn.Module, plan: Plan) -> Iterator[tuple[str, Any]]:
    """Linears outside of ACMs, and that no site was made of, by name."""
    refs = {ref.weight for site in plan.sites for ref in (*site.first, *([site.last] if site.last else []))}
    # an attention that is still packed reads its output projection's weight instead of calling it
    apart = (ACM, nn.MultiheadAttention)
    within = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, apart))
    for name, module in model.named_modules():
        is_linear = type(module) in (nn.Linear, NonDynamicallyQuantizableLinear) or _is_conv1d(module)
        if is_linear and name and f"{name}.weight" not in refs and not name.startswith(within):
            yield name, module


def _is_conv1d(module: nn.Module) -> bool:
    """True for the linear of GPT-2, whose weight is [D, O]."""
    return f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D"


def _is_able(linear: nn.Module, to: integers.To) -> bool:
    weight = linear._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or not weight.numel():
        return False
    hooked = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or "forward" in vars(linear)
    if to == "int4" and weight.shape[0 if _is_conv1d(linear) else 1] % 2:
        return False
    return not hooked and max(weight.shape) <= int8.DEEPEST


def _heads(model: nn.Module, plan: Plan) -> set[str]:
    """Linears whose output is the model's prediction, or chooses experts."""
    known = (*plan.skipped, *plan.kept)
    names = {skip.name for skip in known if skip.reason in (CLASSIFIER, ROUTER)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return names | {name for name, module in model.named_modules() if module is head}


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(matches_name(pattern, name) for pattern in patterns)
