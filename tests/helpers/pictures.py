"""A tiny picture model with hand-made ACMs whose gates look at brightness, its data and its task."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, Conversion
from acm_compiler.tasks.classify import Classify
from tests.helpers.build import acm_for, plan_of, planned_site

SIDE, PATCH, GRID = 12, 4, 3
TOKENS = GRID * GRID + 1
DENSE_MACS = 2 * TOKENS * 2 * 8 * 32 + 8 * 3  # two MLPs on every token, and the head
OPEN = (4 + 9 * 1) / (TOKENS * 4)
TASK = Classify()


class Picture(nn.Module):
    """[B, 1, 12, 12] -> logits [B, 3]: nine patches after one token without a place, two ACMs side by side."""

    def __init__(self, acms: list[nn.Module]) -> None:
        super().__init__()
        self.acms = nn.ModuleList(acms)
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        patches = F.avg_pool2d(image, PATCH).flatten(1)[..., None]
        x = F.pad(torch.cat([patches.expand(-1, -1, 4), torch.ones(*patches.shape[:2], 4)], dim=-1), (0, 0, 1, 0))
        return self.head((x + sum(acm(x) for acm in self.acms)).mean(1))


def picture_model(*, dense: bool = False) -> Picture:
    """Sites `left` and `right`; at budget OPEN their gates give the bright patch 4 learners and all other tokens 1."""
    torch.manual_seed(0)
    sites = [planned_site(name, tokens=TOKENS) for name in ("left", "right")]
    plan = plan_of(*sites, dense_macs=DENSE_MACS)
    acms = [acm_for(site) for site in sites]
    points = (BudgetPoint(share=OPEN, knob=0.0, k_lo=0), BudgetPoint(share=1.0, knob=-99.0, k_lo=0))
    owner = Conversion(plan=plan, table=BudgetTable(rule="logits", points=points, examples=9))
    for acm in acms:
        acm.conversion = owner
        _look_at_brightness(acm)
        acm.dense = nn.Linear(8, 8).requires_grad_(False) if dense else None
    return Picture(acms).eval()


@torch.no_grad()
def _look_at_brightness(acm: nn.Module) -> None:
    gate = acm.gate
    for parameter in gate.parameters():
        parameter.zero_()
    gate.inner.weight[0, 0] = 20.0  # gelu(20 b - 10): about 10 on bright patches, 0 on dark ones
    gate.inner.bias[0] = -10.0
    gate.outer.weight[4, 0] = 1.0
    gate.outer.bias.copy_(torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0]))


def picture_batch(count: int, *, first: int = 0) -> dict[str, Tensor]:
    """Pictures with one bright patch, which is the foreground; each of a source that it shares with three others."""
    index = torch.arange(first, first + count)
    patches = torch.zeros(count, GRID * GRID).scatter_(1, (index % 9)[:, None], 1.0)
    image = patches.view(count, 1, GRID, GRID).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    return {"image": image, "label": index % 3, "source": index // 4, "foreground": image[:, 0] > 0.5, "index": index}
