"""The dense computation that an ACM replaces, kept while something may still need it (docs/semantics.md, The start).

As a module it answers for the site; as plain tensors every closed form starts from it.
Shapes: T tokens, D in, F hidden neurons, O out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.activations import resolve
from acm_compiler.acm.intact import refuse_without_dense
from acm_compiler.acm.module import Tap
from acm_compiler.errors import PlanMismatch, TrainingFailed, counted
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.offload import device_of, kept
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.site import LinearRef, Site

DenseLinear = tuple[Tensor, Tensor | None]
_ROLES = ("first", "up", "last")
_PACKED = ("first", "second", "third")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of `model` under each of its names."""
    return dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))


def tensor_names(site: Site) -> list[str]:
    """The names of all parameters that the site's linears use, each once."""
    names = [name for ref in site.refs for name in (ref.weight, ref.bias) if name is not None]
    return list(dict.fromkeys(names))


def dense_linear(ref: LinearRef, tensors: Mapping[str, Tensor]) -> DenseLinear:
    """(weight [out, in], bias [out] or None) that `ref` means; views of `tensors`."""
    weight = tensors[ref.weight]
    bias = None if ref.bias is None else tensors[ref.bias]
    if ref.transposed:
        weight = weight.t()
    if ref.rows is not None:
        start, stop = ref.rows
        weight, bias = weight[start:stop], None if bias is None else bias[start:stop]
    return weight, bias


def packed_linear(refs: Sequence[LinearRef], tensors: Mapping[str, Tensor]) -> DenseLinear:
    """(weight [sum of outs, in], bias) of one linear that gives the outputs of all of `refs` side by side."""
    if len(refs) == 1:
        return dense_linear(refs[0], tensors)
    linears = [dense_linear(ref, tensors) for ref in refs]
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in linears]
    bias = None if all(ref.bias is None for ref in refs) else torch.cat(biases)
    return torch.cat([weight for weight, _ in linears]), bias


class DenseRegion(nn.Module):
    """The replaced region of one site, computed from the original parameters, [..., D] -> [..., O].

    Holds the very Parameter objects of the model; packed, transposed and sliced weights are views taken when it
    runs. Without dropout: what a graft swallowed is applied by the ACM.
    """

    _is_packed = False  # as in models that were pickled before there were any

    def __init__(self, site: Site, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.act = site.act
        self._refs, self._is_packed = site.refs, site.last is None and len(site.first) > 1
        self._held: dict[str, str] = {}
        roles = (*_ROLES[: len(site.first)], "last") if site.last is not None else _PACKED[: len(site.first)]
        for role, ref in zip(roles, self._refs, strict=True):
            for part, name in (("weight", ref.weight), ("bias", ref.bias)):
                if name is not None and name not in self._held:
                    self._held[name] = f"{role}_{part}"
                    self._hold(f"{role}_{part}", tensors[name])

    def _hold(self, attribute: str, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(attribute, tensor)
        else:
            self.register_buffer(attribute, tensor)

    def held(self) -> dict[str, Tensor]:
        """The tensors it holds, by their names in the model before the rewrite."""
        return {name: getattr(self, attribute) for name, attribute in self._held.items()}

    def forward(self, x: Tensor) -> Tensor:
        tensors = self.held()
        if self._is_packed:
            return torch.cat([F.linear(x, *dense_linear(ref, tensors)) for ref in self._refs], -1)
        first, *others = (dense_linear(ref, tensors) for ref in self._refs)
        hidden = resolve(self.act)(F.linear(x, *first))
        for up in others[:-1]:
            hidden = hidden * F.linear(x, *up)
        return F.linear(hidden, *others[-1]) if others else hidden


def check_tensors(sites: Iterable[Site], model: nn.Module) -> None:
    """Raise PlanMismatch unless every parameter that `sites` name is there with the size they expect."""
    tensors = named_tensors(model)
    for site in sites:
        check_named(tensor_names(site), tensors, "parameters", site, model)
        shapes = [tuple(dense_linear(ref, tensors)[0].shape) for ref in site.refs]
        if shapes != _expected_shapes(site):
            raise PlanMismatch(
                "the plan expects weights of another size",
                where=site.name,
                found=shapes,
                expected=_expected_shapes(site),
                fix="plan again: acm.plan(model, example_inputs)",
            )


def check_named(names: Iterable[str], there: Collection[str], what: str, site: Site, model: nn.Module) -> None:
    """Raise PlanMismatch unless what a site names is there in the model."""
    if missing := [name for name in names if name not in there]:
        raise PlanMismatch(
            f"the plan names {what} that this {type(model).__name__} does not have",
            where=site.name,
            found=", ".join(missing),
            fix="plan again: acm.plan(model, example_inputs)",
        )


def _expected_shapes(site: Site) -> list[tuple[int, int]]:
    if site.last is None:
        return [(width, site.d_in) for width in site.graft.widths or (site.d_out,)]
    assert site.dense_width is not None
    return [*[(site.dense_width, site.d_in)] * len(site.first), (site.d_out, site.dense_width)]


def pass_on(acm: ACM, x: Tensor, output: Tensor) -> None:
    """The tap that looks at nothing: the dense region's output is passed on."""


@contextmanager
def dense_regions_run(acms: Iterable[ACM], tap: Tap = pass_on) -> Iterator[None]:
    """While open, these ACMs run the dense regions they replaced, whose outputs `tap` is shown."""
    acms = list(acms)
    for acm in acms:
        acm.tap = tap
    try:
        yield
    finally:
        for acm in acms:
            acm.tap = None


@torch.no_grad()
def weights_digest(sites: Iterable[Site], model: nn.Module) -> str | None:
    """A digest of the dense weights that `sites` replace; None for a model without values (meta).

    sha256 over each parameter's name, shape and values rounded to bfloat16, in the plan's order: a base model
    loaded in another floating type is still the same teacher, a further trained one is not.
    """
    tensors = named_tensors(model)
    digest = hashlib.sha256()
    for name in dict.fromkeys(name for site in sites for name in tensor_names(site)):
        tensor = tensors[name]
        if tensor.is_meta:
            return None
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        digest.update(values.view(torch.int16).numpy().data)
    return digest.hexdigest()


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
        """The device on which the weights are computed with."""
        return device_of(self.first[0][0])

    def hidden(self, x_TD: Tensor) -> Tensor:
        """Hidden activations [T, F] of an MLP."""
        h_TF = resolve(self.act)(F.linear(x_TD, *self.first[0]))
        for up in self.first[1:]:
            h_TF = h_TF * F.linear(x_TD, *up)
        return h_TF

    def reordered(self, order_F: Tensor) -> DenseWeights:
        """The same MLP with its hidden neurons in this order."""
        assert self.last is not None
        first = tuple((w_FD[order_F], None if b_F is None else b_F[order_F]) for w_FD, b_F in self.first)
        return DenseWeights(first=first, last=(self.last[0][:, order_F], self.last[1]), act=self.act)


def read_dense(found: Rewritten, names: Iterable[str] | None = None) -> dict[str, DenseWeights]:
    """The dense weights of every site, or of those named; NoDenseRegion, with the site's name, where they are gone."""
    wanted = {name: found.acms[name] for name in (found.acms if names is None else names)}
    tensors = named_tensors(found.model) | _replaced(found, wanted)
    return {name: _weights_of(found.plan.site(name), tensors) for name in wanted}


@contextmanager
def broken_weights_named(found: Rewritten) -> Iterator[None]:
    """Inside, a TrainingFailed names the weights at fault, where some of the model before the rewrite are not finite.

    Buffers count where they hold nan: an infinity may be meant there, as in a mask.
    """
    try:
        yield
    except TrainingFailed as seen:
        broken = _broken_weights(found)
        if not broken:
            raise
        name, tensor = next(iter(broken.items()))
        more = f"; {len(broken) - 1} more of the model's weights are broken" if len(broken) > 1 else ""
        raise TrainingFailed(
            "the model's own weights are not finite",
            where=name,
            found=f"nan or infinity in {int((~tensor.isfinite()).sum()):,} of {counted(tensor.numel(), 'value')}{more}",
            fix="load or train the model anew before the rewrite: nothing can be fitted to such weights",
        ) from seen


def _broken_weights(found: Rewritten) -> dict[str, Tensor]:
    of_acms = {id(tensor) for acm in found.acms.values() for tensor in named_tensors(acm).values()}
    kept = {name: tensor for name, tensor in named_tensors(found.model).items() if id(tensor) not in of_acms}
    return {name: t.detach() for name, t in (kept | _replaced(found, found.acms)).items() if _is_broken(t)}


def _replaced(found: Rewritten, acms: Mapping[str, ACM]) -> dict[str, Tensor]:
    """The tensors of these ACMs' dense regions by their names in the model before the rewrite."""
    held = (_held_by(acm, found.plan.site(name)) for name, acm in acms.items())
    return {name: tensor for tensors in held for name, tensor in tensors.items()}


def _is_broken(tensor: Tensor) -> bool:
    infinite = isinstance(tensor, nn.Parameter) and bool(tensor.isinf().any())
    return infinite or bool(tensor.isnan().any())


def _held_by(acm: ACM, site: PlannedSite) -> dict[str, Tensor]:
    """The tensors of one dense region by their names in the model before the rewrite."""
    if acm.dense is None:
        refuse_without_dense(site.name)
    if isinstance(acm.dense, DenseRegion):
        return acm.dense.held()
    # the replaced module itself, which was registered under the graft's path
    return {f"{site.graft.modules[0]}.{name}": tensor for name, tensor in named_tensors(acm.dense).items()}


def _weights_of(site: PlannedSite, tensors: Mapping[str, Tensor]) -> DenseWeights:
    if any(name not in tensors for name in tensor_names(site)):
        refuse_without_dense(site.name)
    if site.last is None:
        return DenseWeights(first=(_as_float(packed_linear(site.first, tensors)),), last=None, act=site.act)
    first = tuple(_as_float(dense_linear(ref, tensors)) for ref in site.first)
    return DenseWeights(first=first, last=_as_float(dense_linear(site.last, tensors)), act=site.act)


def _as_float(linear: DenseLinear) -> DenseLinear:
    weight, bias = (None if t is None else t.detach() for t in linear)
    assert weight is not None
    if weight.element_size() < 4:
        weight, bias = kept(weight.float()), None if bias is None else bias.float()
    return weight, bias
