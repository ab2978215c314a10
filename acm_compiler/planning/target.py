"""Sites that stay dense on a device because they would be slower there as ACMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from acm_compiler.errors import a_few_of
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.planner import plan_sites
from acm_compiler.planning.site_times import (
    MEASURED,
    Device,
    ExpectedTime,
    Key,
    MeasuredTime,
    device_of,
    expected_times,
    read_measured,
)
from acm_compiler.recipe.schema import GateConfig, SiteRule, TargetConfig
from acm_compiler.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device with the times that were measured there, the examples of a call, and the share of learners that runs."""

    device: Device
    batch: int | None
    share: float
    measured: Mapping[Key, MeasuredTime] = field(default_factory=dict)

    @staticmethod
    def of(config: TargetConfig, share: float) -> Target:
        """A recipe's target, with what `benchmarks/first_gpu_run` has left in the folder where a command is started."""
        device = device_of(config.device)
        return Target(device=device, batch=config.batch, share=share, measured=read_measured(MEASURED, device.name))

    def __str__(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.device.name} at budget {self.share:g}{batch}"

    def times(self, planned: Sequence[PlannedSite], examples: int, shares: Sequence[float]) -> list[ExpectedTime]:
        """Times of the sites at the target's batch; they were planned for a call with so many examples."""
        batch = self.batch or examples
        here = [replace(site, tokens=site.tokens * batch // examples) for site in planned]
        return expected_times(here, self.device, shares, dict(self.measured))

    def slower(self, planned: Sequence[PlannedSite], examples: int) -> dict[str, str]:
        """Sites that would take no less time as ACMs than dense, by name, each with the reason why it stays dense."""
        return {
            time.site.name: f"slower as an ACM on {self}: {time.ratios[0]:.2f} of the dense time, "
            f"{'measured' if time.is_measured else 'expected'}"
            for time in self.times(planned, examples, (self.share,))
            if time.ratios[0] >= 1
        }

    def note(self, slower: Sequence[str]) -> str:
        """The sentence of a plan on sites that stay dense."""
        return (
            f"{len(slower)} site{'s' * (len(slower) > 1)} would be slower as ACMs on {self} and "
            f"stay{'s' * (len(slower) == 1)} dense: {a_few_of(slower, 2)}"
        )


def plan_sites_for(
    target: Target | None,
    found: Sequence[Site],
    chosen: Mapping[str, SiteRule],
    gate: GateConfig,
    *,
    examples: int,
) -> tuple[tuple[PlannedSite, ...], dict[str, str]]:
    """`plan_sites` without what would be slower on the target, and these sites with their reasons.

    examples: of the call that the sites were found in.

    Planned anew until nothing is slower: a projection whose partner stays dense takes another form.
    """
    slower: dict[str, str] = {}
    while True:
        rules = {name: rule for name, rule in chosen.items() if name not in slower}
        planned = plan_sites(found, rules, gate)
        more = {} if target is None else target.slower(planned, examples)
        more |= {
            site.name: f"its partner {site.pair.partner} stays dense"
            for site in planned
            if site.pair and site.pair.partner in more and site.name not in more and rules[site.name].form == "slices"
        }
        if not more:
            return planned, slower
        slower |= more
