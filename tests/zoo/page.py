"""The page that says what is found in each model of the zoo: docs/models.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from tabulate import tabulate

from acm_compiler.planning.plan import Plan
from tests.zoo.catalogue import FAMILIES

_HEAD = """# Models

Generated from `tests/zoo` by `ACM_ACCEPT=1 make zoo`; do not edit. Every model here is built small from its
configuration, without weights. What is stated of its sites was written from the model's source, and every run of
`make zoo` compares the two: each site once, nothing else, with the right matrices, widths and bypass; the plan's MACs
equal to torch's own count; the rewritten model's outputs equal to the original's.

*MLP* and *gated MLP* sites are counted by block, *attention* by projection; *packed* are matrices that hold several
projections (qkv, kv, qk), each one ACM of that width. *Share* is the part of the small model's MACs that lies in sites;
of a published model `acmc plan` tells it. *Stays dense* gives the reasons why linears and convolutions are not
converted, and how many they concern. What became of some trained models is in
[results/real-models.md](results/real-models.md).
"""

_NEWCOMERS = """The truths of these eleven models were written and committed before any of them had been planned.
Of their 171 sites the finder as it was then found 163, and none where there is none; of those 157 were right in every
respect, one had the wrong role (the queries of Hiera's qkv are pooled) and five were said to have no bypass (it was
made of learned queries, or joined or cut anew). Not found were seven projections of Reformer, whose softmax is written
out, and one of VOLO, whose windows overlap. Rewritten, all eleven kept their outputs. The table is from after that was
mended.
"""


def page(plan_of: Callable[[str], Plan]) -> str:
    """The page as text; `plan_of` gives the plan of the model with a name."""
    parts = [_HEAD]
    for family, models in FAMILIES.items():
        rows = [[model.name, *_sites(plan_of(model.name)), _skips(plan_of(model.name))] for model in models]
        headers = ["model", "MLP", "gated MLP", "attention", "packed", "share", "stays dense"]
        parts += [f"## {family[0].upper()}{family[1:]}\n", *([_NEWCOMERS] if family == "newcomers" else [])]
        parts += [tabulate(rows, headers, tablefmt="github"), ""]
    return "\n".join(parts)


def _sites(plan: Plan) -> list[object]:
    kinds = Counter("packed" if len(site.role or "") > 1 else site.kind for site in plan.sites)
    counts = [kinds[kind] or "" for kind in ("mlp", "gated_mlp", "linear", "packed")]
    share = sum(cost.dense_macs for cost in plan.cost.sites) / plan.model.dense_macs
    return [*counts, f"{share:.0%}"]


def _skips(plan: Plan) -> str:
    reasons = Counter(re.split(r"[:;(]| by ", skip.reason)[0].strip() for skip in plan.skipped)
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())
