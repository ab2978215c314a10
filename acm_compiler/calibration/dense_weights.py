"""The weights that an ACM replaced, as plain tensors: what every closed form starts from.

Shapes: T tokens, D in, F hidden neurons, O out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.activations import resolve
from acm_compiler.errors import NoDenseRegion
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.dense_region import DenseLinear, DenseRegion, dense_linear, named_tensors, tensor_names
from acm_compiler.planning.decisions import PlannedSite


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeights:
    """A site's dense region in fp32 (or float64).

    first: (weight [F, D], bias) of the activated branch and, when gated, of the multiplied branch; of a linear site
    (weight [O, D], bias). last: (weight [O, F], bias), None for a linear site. Absent biases are None.
    """

    first: tuple[DenseLinear, ...]
    last: DenseLinear | None
    act: str

    @property
    def device(self):
        """The device of the weights."""
        return self.first[0][0].device

    def hidden(self, x_TD: Tensor) -> Tensor:
        """Hidden activations [T, F] of an MLP."""
        h_TF = resolve(self.act)(F.linear(x_TD, *self.first[0]))
        for up in self.first[1:]:
            h_TF = h_TF * F.linear(x_TD, *up)
        return h_TF

    def output(self, x_TD: Tensor) -> Tensor:
        """Output of the dense region, [T, O]."""
        return F.linear(x_TD, *self.first[0]) if self.last is None else F.linear(self.hidden(x_TD), *self.last)


def read_dense(found: Rewritten) -> dict[str, DenseWeights]:
    """The dense weights of every site; NoDenseRegion, with the site's name, where they are gone."""
    tensors = named_tensors(found.model) | _replaced(found)
    return {name: _weights_of(found.plan.site(name), tensors) for name in found.acms}


def broken_weights(found: Rewritten) -> dict[str, Tensor]:
    """The weights of the model before the rewrite that are not finite, by their names there.

    Buffers count where they hold nan: an infinity may be meant there, as in a mask.
    """
    of_acms = {id(tensor) for acm in found.acms.values() for tensor in named_tensors(acm).values()}
    kept = {name: tensor for name, tensor in named_tensors(found.model).items() if id(tensor) not in of_acms}
    return {name: t.detach() for name, t in (kept | _replaced(found)).items() if _is_broken(t)}


def _replaced(found: Rewritten) -> dict[str, Tensor]:
    """The tensors of all dense regions by their names in the model before the rewrite."""
    held = (_held_by(acm, found.plan.site(name)) for name, acm in found.acms.items())
    return {name: tensor for tensors in held for name, tensor in tensors.items()}


def _is_broken(tensor: Tensor) -> bool:
    infinite = isinstance(tensor, nn.Parameter) and bool(tensor.isinf().any())
    return infinite or bool(tensor.isnan().any())


def _held_by(acm: ACM, site: PlannedSite) -> dict[str, Tensor]:
    """The tensors of one dense region by their names in the model before the rewrite."""
    if acm.dense is None:
        raise _gone(site.name)
    if isinstance(acm.dense, DenseRegion):
        return acm.dense.held()
    # the replaced module itself, which was registered under the graft's path
    return {f"{site.graft.modules[0]}.{name}": tensor for name, tensor in named_tensors(acm.dense).items()}


def _weights_of(site: PlannedSite, tensors: Mapping[str, Tensor]) -> DenseWeights:
    if any(name not in tensors for name in tensor_names(site)):
        raise _gone(site.name)
    first = tuple(_as_float(dense_linear(ref, tensors)) for ref in site.first)
    last = None if site.last is None else _as_float(dense_linear(site.last, tensors))
    return DenseWeights(first=first, last=last, act=site.act)


def _as_float(linear: DenseLinear) -> DenseLinear:
    weight, bias = (None if t is None else t.detach() for t in linear)
    assert weight is not None
    if weight.element_size() < 4:
        weight, bias = weight.float(), None if bias is None else bias.float()
    return weight, bias


def _gone(site: str) -> NoDenseRegion:
    return NoDenseRegion(
        "the dense weights that this ACM replaced are not there any more, and calibrate starts from them",
        where=site,
        fix="calibrate a fresh rewrite, or load with the original model: acm.load(directory, base_model=model)",
    )
