"""Processes that hold parts of the same learners: `torchrun -m tests.helpers.split_ranks DIR FORM…`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import acm_compiler as acm
from tests.helpers.build import planned_site, stack_of
from tests.helpers.models import Mlp, Residual, Stack, example

N = 4
LINEAR = {"kind": "linear", "dense_width": None, "last": None, "act": "identity", "learner_act": "identity", "k_min": 1}
GATED = {"kind": "gated_mlp", "act": "silu", "learner_act": "silu"}
FORMS = {
    "mlp": {},
    "gated": GATED,
    "linear": LINEAR,
    "mlp_top": {"second_layer": "shared_top", "lossless": True},
    "mlp_per_k": {"second_layer": "per_k", "lossless": True},
    "linear_top": LINEAR | {"lossless": True},
}


def model_of(form: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two sites of one form, whose learners are 7 neurons wide: parts of unequal width. Equal in all processes."""
    torch.manual_seed(0)
    return stack_of(*(planned_site(name, width=7, **FORMS[form]) for name in ("acms.0", "acms.1")), dtype=dtype)


def tokens(count: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tokens [count, 5, 8], the same in all processes."""
    return torch.randn(count, 5, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model with all its sites split over the processes of `mesh`."""
    return parallelize_module(model, mesh, {name: acm.SplitLearners() for name in acm.sites(model)})


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which each process may hold a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(model: nn.Module, x: Tensor, *, of: str) -> Iterator[tuple[str, Tensor]]:
    """Output of a model, and gradients to its input and to its parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)
    loss = y.square().sum()
    if model.training:
        loss = loss + sum(acm.losses(model, budget=0.5).values())
    loss.backward()
    yield f"{of}/y", y.detach()
    yield f"{of}/dx", x.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"{of}/{name}", whole(parameter.grad)


def each_form(forms: Sequence[str], mesh: DeviceMesh) -> Iterator[tuple[str, Tensor]]:
    """Each form at each k, at k that differ between tokens, and with relaxed gates: whole, and split."""
    for form in forms:
        one = model_of(form).eval()
        for what, model in {"whole": one, "split": split(copy.deepcopy(one), mesh)}.items():
            for k in range(N + 1):
                acm.set_k(model, k)
                yield from outcome(model, tokens(), of=f"{what}/{form}/k{k}")
            for site in acm.sites(model).values():
                site.set_choices(knob=0.0, k_lo=0, k_hi=N)
            yield from outcome(model, tokens(), of=f"{what}/{form}/mixed")
            yield from outcome(model, tokens(0), of=f"{what}/{form}/none")
            acm.relax(model.train(), 0.8)
            torch.manual_seed(3)
            yield from outcome(model, tokens(), of=f"{what}/{form}/relaxed")


def other_values(mesh: DeviceMesh) -> Iterator[tuple[str, Tensor]]:
    """bfloat16, autocast, and a token that is not a number."""
    for what in ("whole", "split"):
        half, single = model_of("mlp", torch.bfloat16), model_of("mlp", torch.float32)
        if what == "split":
            half, single = split(half, mesh), split(single, mesh)
        x = tokens(dtype=torch.float32)
        with torch.no_grad():
            yield f"{what}/bf16", half(x.bfloat16()).float()
            with torch.autocast("cpu", torch.bfloat16):
                yield f"{what}/autocast", single(x).float()
            x[0, 0, 0] = torch.nan
            yield f"{what}/nan", single(x)


def saved(directory: Path, mesh: DeviceMesh) -> Iterator[tuple[str, Tensor]]:
    """A split model that was saved, and loaded again in one piece and in parts."""
    torch.manual_seed(0)
    original = Stack(Residual(Mlp()), Residual(Mlp())).eval()
    model = acm.rewrite(original, acm.plan(original, example(), sites="mlp"))
    batches = [example() for _ in range(8)]
    acm.calibrate(model, batches, tokens=200, budgets=[0.5])
    parts = split(copy.deepcopy(model), mesh)
    acm.save(parts, directory / "saved")
    loaded = acm.load(directory / "saved", base_model=original)
    again = split(acm.load(directory / "saved", base_model=original), mesh)
    for name, found in {"calibrated": model, "parts": parts, "loaded": loaded, "again": again}.items():
        acm.set_budget(found, 0.5)
        with torch.no_grad():
            yield f"{name}/y", found(batches[0])


def sharded_too(mesh: DeviceMesh) -> Iterator[tuple[str, Tensor]]:
    """Learners split over pairs of processes, parameters sharded over the others; two examples of four each."""
    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("dp", "tp"))
    one = model_of("mlp").eval()
    model = split(copy.deepcopy(one), both["tp"])
    for part in (*model.acms, model):
        fully_shard(part, mesh=both["dp"])
    x = tokens(4)
    own = x.chunk(2)[both["dp"].get_local_rank()]
    for found, given in ((one, x), (model, own)):
        acm.set_k(found, 2)
        found(given).square().mean().backward()
    for (name, parameter), (_, part) in zip(one.named_parameters(), model.named_parameters(), strict=True):
        if parameter.grad is not None:
            yield f"both_whole/{name}", parameter.grad
            yield f"both/{name}", whole(part.grad)


def main() -> None:
    """Run, and keep what every process saw."""
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = dict(each_form(sys.argv[2:], mesh)) | dict(other_values(mesh)) | dict(saved(directory, mesh))
    if mesh.size() == 4:
        found |= dict(sharded_too(mesh))
    found = {name: tensor.contiguous().clone() for name, tensor in found.items()}
    save_file(found, directory / f"rank{dist.get_rank()}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
