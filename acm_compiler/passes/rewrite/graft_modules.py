"""Put an ACM into a live model by replacing modules or parameters in place, and carry the user's hooks over.

module     mlp           -> ACM                         the replaced module is the dense region
packed     q, k, v       -> PackedACM, PackedPart, PackedPart
tile       fc1, act, fc2 -> PassThrough, PassThrough, ACM
stash      fc1, fc2      -> StashInput, ACM             functions in between run on a dummy
parameter  w1, w2        -> WeightStandIn, twice        where no module equals or frames the region
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.passes.capture.unpacked_attention import HOOK_TABLES
from acm_compiler.passes.rewrite.dense_region import DenseRegion
from acm_compiler.passes.rewrite.parameter_proxy import Replaced, stand_in_for, uses_of
from acm_compiler.passes.rewrite.stand_ins import PackedACM, PackedPart, PassThrough, Stash, StashedACM, StashInput
from acm_compiler.site import Site

Paths = dict[nn.Module, list[str]]


@dataclass(slots=True, kw_only=True)
class TakenOut:
    """Parts that a graft took out of a model, for `revert`.

    `modules`: what was at each path; None where only the ACM was added. `tensors`: owner and attribute of each
    parameter taken out by itself, with its name before the rewrite. `frozen`: names of the dense region's parameters
    that were trainable.
    """

    modules: dict[str, nn.Module | None] = field(default_factory=dict)
    tensors: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


def graft_modules(model: nn.Module, site: Site, acm: ACM, tensors: Mapping[str, Tensor], *, paths: Paths) -> None:
    """Put `acm` in the place of the modules that `site.graft` names (W, P, T, S), wherever they are registered.

    `tensors`, by name, and `paths` are the model's, from before the first graft.
    """
    modules = [model.get_submodule(name) for name in site.graft.modules]
    taken = TakenOut(modules={path: module for module in modules for path in paths[module]})
    if site.graft.kind == "W":
        acm.dense = modules[0]
        if len(modules) == 1:
            move_hooks(modules[0], acm)
    else:
        acm.dense = DenseRegion(site, tensors)
    for name, module, stand_in in zip(site.graft.modules, modules, stand_ins_of(site, acm), strict=True):
        warn_of_hooks(module, name)
        stand_in.train(module.training)
        _show_weights(module, stand_in, site, acm, tensors=tensors)
        for path in paths[module]:
            put_module(model, path, stand_in)
    acm.replaced = taken


def stand_ins_of(site: Site, acm: ACM) -> list[nn.Module]:
    """The modules that take the places of those that `site.graft` names (W, P, T, S), in their order."""
    earlier = range(len(site.graft.modules) - 1)
    if site.graft.kind == "W":
        return [acm for _ in site.graft.modules]
    if isinstance(acm, PackedACM):
        acm.widths, acm.stashes = [*site.graft.widths], [Stash() for _ in earlier]
        return [acm, *(PackedPart(site.name, stash=stash) for stash in acm.stashes)]
    if site.graft.kind == "T":
        return [*(PassThrough(site.name) for _ in earlier), acm]
    assert isinstance(acm, StashedACM)
    width = max(1, site.graft.stash_width)
    # both first linears of a gated MLP read the same x
    return [*(StashInput(site.name, stash=acm.stash if i == 0 else None, width=width) for i in earlier), acm]


def _show_weights(
    module: nn.Module, stand_in: nn.Module, site: Site, acm: ACM, *, tensors: Mapping[str, Tensor]
) -> None:
    """Let code that asks `module` for its weight's dtype or size, as in `x.to(self.up.weight.dtype)`, find them."""
    show_sizes(module, stand_in)
    for leaf, parameter in module._parameters.items():
        for name, axis, use in uses_of(site, acm, tensors):
            if tensors[name] is parameter:
                stand_in.__dict__[leaf] = stand_in_for(parameter, Replaced(name=name, out_axis=axis, uses=[use]))


def show_sizes(module: nn.Module, stand_in: nn.Module) -> None:
    """Give `stand_in` the sizes that a linear shows, and the parameters that it was built without."""
    for attribute in ("in_features", "out_features"):
        if attribute in module.__dict__:
            stand_in.__dict__[attribute] = module.__dict__[attribute]
    stand_in.__dict__.update(dict.fromkeys((leaf for leaf, p in module._parameters.items() if p is None), None))


def paths_of(model: nn.Module) -> Paths:
    """Every path of every module."""
    paths: Paths = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(path)
    return paths


def put_module(model: nn.Module, path: str, module: nn.Module | None) -> None:
    """Register `module` at `path`, in the place and order of what is there."""
    parent, _, leaf = path.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = module


def owners_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Owners of each parameter and buffer of the model, by its id; dense regions do not count."""
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, DenseRegion):
            continue
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners[id(tensor)].append((module, leaf))
    return owners


def registry_of(owner: nn.Module, leaf: str) -> dict[str, Tensor | None]:
    """The table of `owner` that holds its parameter or buffer `leaf`."""
    return owner._parameters if leaf in owner._parameters else owner._buffers  # type: ignore[return-value]


def freeze_dense_regions(model: nn.Module, acms: Iterable[ACM]) -> None:
    """Take the dense regions' parameters out of training, but for those that the model also uses elsewhere."""
    acms = [acm for acm in acms if acm.dense is not None]
    inside = {module for acm in acms for module in acm.dense.modules()}  # type: ignore[union-attr]
    outside = {id(p) for module in model.modules() if module not in inside for p in module._parameters.values()}
    for acm in acms:
        assert acm.dense is not None
        acm.dense.eval()
        for name, parameter in acm.dense.named_parameters():
            if parameter.requires_grad and id(parameter) not in outside:
                parameter.requires_grad_(False)
                acm.replaced.frozen.append(name)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


_NO_GRADIENTS = {"no_grad", "inference_mode", "set_grad_enabled"}


class LostHookWarning(UserWarning):
    """A hook, a patched forward, or a block without gradients, on a module that no longer runs."""


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give the hooks of `old` to `new`, which takes its place with the same inputs and outputs."""
    for name in HOOK_TABLES:
        # the very tables, so that handles given out before still remove their hooks
        mine, theirs = getattr(new, name), getattr(old, name)
        setattr(new, name, theirs)
        setattr(old, name, mine)


def warn_of_hooks(module: nn.Module, site: str) -> None:
    """Warn, by name, of what `module` and its parts will not do any more: hooks, patched forwards, `torch.no_grad`."""
    for path, part in module.named_modules():
        kinds = [name.strip("_").replace("_", " ") for name in _HOOKS if getattr(part, name)]
        if "forward" in part.__dict__:
            kinds.append("a forward of its own")
        if _stops_gradients(part):
            kinds.append("torch.no_grad, which keeps gradients from the input,")
        if kinds:
            where = f"{type(part).__name__} {path}".strip()
            warnings.warn(
                f"{site}: {', '.join(kinds)} of the {where} that was here will not run: an ACM took its place",
                LostHookWarning,
                stacklevel=2,
            )


def _stops_gradients(module: nn.Module) -> bool:
    """True if the forward of the module's class is, or opens, a block without gradients."""
    forward = type(module).forward
    if (code := getattr(forward, "__code__", None)) is None:
        return False
    # torch.no_grad as a decorator keeps a method of itself among its function's variables
    owners = (getattr(cell.cell_contents, "__self__", None) for cell in forward.__closure__ or ())
    return not _NO_GRADIENTS.isdisjoint({*code.co_names, *(type(owner).__name__ for owner in owners)})


Tensors = Mapping[str, Tensor]


def graft_weights(model: nn.Module, sites: Sequence[Site], acms: Mapping[str, ACM], tensors: Tensors) -> None:
    """Put stand-ins in the places of the parameters of `sites`, all at once: sites may share a packed parameter.

    Each ACM is registered under its site's name. `tensors` are the model's, by name, from before the first graft.
    """
    owners = owners_of(model)
    sources: dict[str, Replaced] = {}
    former: dict[nn.Module, ACM] = {}
    for site in sites:
        acm = acms[site.name]
        for name, axis, use in uses_of(site, acm, tensors):
            sources.setdefault(name, Replaced(name=name, out_axis=axis)).uses.append(use)
        former |= dict.fromkeys(_place(model, site, acm), acm)
        acm.dense = DenseRegion(site, tensors)
    for name, source in sources.items():
        for owner, leaf in owners[id(tensors[name])]:
            if owner in former:
                # the ACM took its owner's place, and the forward asks it for the weight
                former[owner].__dict__[leaf] = stand_in_for(tensors[name], source)
            else:
                _replace(owner, leaf, source, tensors[name])


def _place(model: nn.Module, site: Site, acm: ACM) -> list[nn.Module]:
    """Register `acm` under the site's name, and wherever else the module is that was there; gives that module."""
    parent, _, leaf = site.name.rpartition(".")
    there = model.get_submodule(parent)._modules.get(leaf)
    acm.train(model.get_submodule(parent).training)
    paths = [site.name] if there is None else paths_of(model)[there]
    acm.replaced = TakenOut(modules=dict.fromkeys(paths, there))
    for path in paths:
        put_module(model, path, acm)
    if there is None:
        return []
    warn_of_hooks(there, site.name)
    show_sizes(there, acm)
    return [there]


def _replace(owner: nn.Module, leaf: str, source: Replaced, tensor: Tensor) -> None:
    """Let `owner` show a stand-in as its attribute `leaf`; where some rows stay dense it keeps the parameter too."""
    used = {row for use in source.uses for row in range(*use.rows)}
    if len(used) < tensor.shape[source.out_axis]:
        source = dataclasses.replace(source, owner=owner, leaf=leaf)
    else:
        registry_of(owner, leaf)[leaf] = None
    owner.__dict__[leaf] = stand_in_for(tensor, source)
    source.uses[0].acm.replaced.tensors.append((owner, leaf, source.name))
