"""A small rewritten model with every kind of site, its dense regions kept: what the calibration tests calibrate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acm_compiler.calibration.answer import Answer, default_answer
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.calibration.observe import observe
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.passes.rewrite.build_acm import build_acm, start
from acm_compiler.passes.rewrite.conversion import Conversion, rewritten
from acm_compiler.passes.rewrite.dense_region import read_dense
from acm_compiler.planning.cost import learner_unit
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.site import LinearRef
from tests.helpers.build import plan_of, planned_site

WIDTH, HIDDEN, N = 12, 24, 4


class Gated(nn.Module):
    """c(silu(a x) * b x)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.c = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(nn.functional.silu(self.a(x)) * self.b(x))


class Block(nn.Module):
    """Mixes real tokens, then a projection, an MLP and a gated MLP, each beside a bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.proj: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.mlp: nn.Module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.glu: nn.Module = Gated()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mean = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        x = x + self.proj(self.norms[0](x + mean))
        out = self.mlp(self.norms[1](x))
        x = out.add_(x)  # works on a site's output in place, as some models do
        return x + self.glu(self.norms[2](x))


class Tiny(nn.Module):
    """[B, S, 6], attention_mask [B, S] -> [B, S, 12]."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask.float()
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


def tiny_sites(block: str, **changes) -> list[PlannedSite]:
    """The sites of one block; `changes` hold for all of them."""
    common = {"d_in": WIDTH, "d_out": WIDTH, "tokens": 6} | changes
    mlp = {"dense_width": HIDDEN, "width": HIDDEN // N} | common
    glu = {
        "kind": "gated_mlp",
        "act": "silu",
        "learner_act": "silu",
        "first": (LinearRef(weight=f"{block}.glu.a.weight"), LinearRef(weight=f"{block}.glu.b.weight")),
        "last": LinearRef(weight=f"{block}.glu.c.weight"),
    }
    linear = {"kind": "linear", "dense_width": None, "last": None, "act": "identity", "learner_act": "identity"}
    linear |= {"first": (LinearRef(weight=f"{block}.proj.weight", bias=f"{block}.proj.bias"),), "width": 2}
    return [
        planned_site(f"{block}.proj", **{**linear, **common, "k_min": 1, "second_layer": "shared", "state": "dense"}),
        planned_site(f"{block}.mlp", **mlp),
        planned_site(f"{block}.glu", **(mlp | glu)),
    ]


def make_tiny(*, depth: int = 1, seed: int = 0, **changes) -> Tiny:
    """A fresh rewrite of a random `Tiny`, in eval mode: it answers as its dense self."""
    torch.manual_seed(seed)
    model = Tiny(depth)
    for parameter in model.blocks.parameters():
        parameter.data.mul_(2) if parameter.dim() == 2 else None
    sites = [site for i in range(depth) for site in tiny_sites(f"blocks.{i}", **changes)]
    plan = plan_of(*sites)
    tensors = dict(model.named_parameters())
    owner = Conversion(plan=plan)
    for site in sites:
        parent, _, leaf = site.name.rpartition(".")
        acm = build_acm(site, like=tensors[site.first[0].weight], unit=learner_unit(plan.sites))
        start(acm, site, tensors)
        acm.dense, acm.conversion = getattr(model.get_submodule(parent), leaf).requires_grad_(False), owner
        setattr(model.get_submodule(parent), leaf, acm)
    return model.eval()


def observed(
    model: nn.Module,
    batches,
    *,
    answer: Answer = default_answer,
    seed: int = 0,
    sample: int = 1000,
    backward_passes: int = 1,
    fast: bool = False,
    **rest,
):
    """Records of every site of `model`, as its dense self, on `batches`, and the totals of the pass."""
    found = rewritten(model)
    dense = read_dense(found)
    records = {site.name: SiteRecord(site, dense[site.name], sample=sample, seed=3) for site in found.plan.sites}
    with undisturbed(rewritten(model)):
        precision = "bf16" if fast else "fp32"
        options = Options(answer=answer, seed=seed, backward_passes=backward_passes, precision=precision)
        return records, observe(found, masked(batches), records, options, **rest)


def texts(batches: int = 8, batch: int = 4, tokens: int = 6, seed: int = 1) -> list[dict[str, Tensor]]:
    """Batches of examples of different lengths, right-padded with rubbish that must not matter."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(batches):
        lengths = torch.randint(2, tokens + 1, (batch,), generator=generator)
        x = torch.randn(batch, tokens, 6, generator=generator)
        mask = torch.arange(tokens)[None] < lengths[:, None]
        made.append({"x": torch.where(mask[..., None], x, 50.0), "attention_mask": mask.long()})
    return made
