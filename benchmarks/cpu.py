"""Times on a CPU, as ratios to what Inductor makes of the dense model, interleaved in one run.

    python -m benchmarks.cpu sites [--tokens 1576] [--rounds 11]     one MLP and one projection of ViT-B, gate included
    python -m benchmarks.cpu training [--tokens 1576] [--rounds 7]   a step of that MLP, eager and compiled
    python -m benchmarks.cpu vit [--batch 8] [--rounds 5]            all of ViT-B, MLPs and q, k, v, o converted

--dtype bfloat16 measures weights and inputs of that type; OMP_NUM_THREADS says how many threads run. In float32, "vit"
also times what one might pick instead: the dense model with int8 linears (dynamic quantisation).
Weights are drawn: time does not depend on their values, only on k. "mixed" lets drawn gates choose, so that tokens of
one batch run different k; its row gives the share of learner MACs that they chose.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.acm import ACM, Gate, Learners
from acm_compiler.codegen.compare import relative_error
from acm_compiler.evaluation.bench import Timing, int8, interleave
from acm_compiler.site import Layout
from benchmarks.drawn import N, bias_to, converted, drawn, mean_k
from benchmarks.machine import machine

D, HIDDEN, HEADS = 768, 3072, 12
# form and how many projections of the same tokens are one site (`pack: true` in recipes)
KINDS = {
    "mlp": ("mlp", 1),
    "projection (svd)": ("linear", 1),
    "projection (rows)": ("rows", 1),
    "projection (cols)": ("cols", 1),
    "q, k, v packed (svd)": ("linear", 3),
    "q, k, v packed (rows)": ("rows", 3),
}
GATE = {"mlp": 64, "linear": 8, "rows": 8, "cols": 8}  # widths
HEADINGS = ("site", "k/N", "ms", "ratio", "q1", "q3", "error")


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sites", "training", "vit"))
    parser.add_argument("--tokens", type=int, default=1576)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    chosen = parser.parse_args()
    dtype = getattr(torch, chosen.dtype)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(machine())
    if chosen.what == "training":
        training(chosen.tokens, chosen.rounds, dtype=dtype)
        return
    with torch.no_grad():
        if chosen.what == "sites":
            sites(chosen.tokens, chosen.rounds, dtype=dtype)
        else:
            vit(chosen.batch, chosen.rounds, dtype=dtype)


def sites(tokens: int, rounds: int, *, dtype: torch.dtype) -> None:
    """Every kind of site of ViT-B by itself, at every k."""
    x = torch.randn(tokens, D, dtype=dtype)
    rows = []
    for kind in KINDS:
        dense = torch.compile(dense_site(kind).to(dtype))
        eager = drawn_site(kind).to(dtype)
        compiled = torch.compile(eager, backend="acm")
        calls: dict[str, Callable[[], object]] = {"dense": lambda dense=dense: dense(x)}
        lows = range(eager.k_min, N + 1)
        for k in lows:
            calls[f"{k / N:.2f}"] = at_k(eager, compiled, x, k, k)
        calls["mixed"] = at_k(eager, compiled, x, eager.k_min, N)
        errors = {name: site_error(eager, x, *bounds) for name, bounds in bounds_of(eager).items()}
        for name, timing in interleave(calls, base="dense", rounds=rounds).items():
            shown = f"mixed ({mean_k(eager, x) / N:.2f})" if name == "mixed" else name
            rows.append([kind, shown, *cells(timing), f"{errors[name]:.1e}" if name in errors else ""])
    print(tabulate(rows, headers=HEADINGS, tablefmt="github", disable_numparse=True))


def training(tokens: int, rounds: int, *, dtype: torch.dtype) -> None:
    """A step of one MLP: gates frozen, or relaxed with the exact gradient of their choice; k spread about its mean."""
    x = torch.randn(tokens, D).to(dtype).requires_grad_()
    dense, site = dense_site("mlp").to(dtype), drawn_site("mlp").to(dtype).train()
    site.layout = Layout()
    ways = {"eager": (dense, site), "compiled": (torch.compile(dense), torch.compile(site, backend="acm"))}
    rows = []
    for gate in ("frozen", "relaxed"):
        site.temperature = None if gate == "frozen" else 0.8
        site.gate.requires_grad_(gate == "relaxed")
        for wanted in (0.25, 0.6, 1.0):
            bias_to(site, x, wanted)
            for way, (base, ours) in ways.items():
                calls = {"dense": lambda base=base: step(base, dense, x), "acm": lambda ours=ours: step(ours, site, x)}
                found = interleave(calls, base="dense", rounds=rounds)
                rows.append([gate, way, f"{mean_k(site, x) / N:.2f}", *cells(found["acm"])])
    headings = ("gate", "way", "k/N", "ms", "ratio", "q1", "q3")
    print(tabulate(rows, headers=headings, tablefmt="github", disable_numparse=True))


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """One forward and backward of a model by a way to call it; what relaxed gates chose is not kept."""
    for tensor in (x, *model.parameters()):
        tensor.grad = None
    call(x[None]).float().square().sum().backward()
    if isinstance(model, ACM):
        model.choices.clear()


class Projections(nn.Module):
    """Projections of the same tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(D, D) for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.each)


def dense_site(kind: str) -> nn.Module:
    """The site before its conversion."""
    form, count = KINDS[kind]
    if form == "mlp":
        return nn.Sequential(nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, D))
    return Projections(count)


def drawn_site(kind: str) -> ACM:
    """An ACM with drawn weights, whose gate spreads tokens over all k, of the dense site's MACs without its gate."""
    form, count = KINDS[kind]
    k_min, outputs = int(form != "mlp"), count * D
    learners = Learners(
        D,
        outputs,
        N,
        {"mlp": HIDDEN, "linear": D * outputs // (D + outputs)}.get(form, outputs) // N,
        form=form,
        act="gelu" if form == "mlp" else "identity",
        bias_in=form == "mlp",
        heads=HEADS * count if form in ("rows", "cols") else 1,
    )
    learners.start_random()
    gate = Gate(D, GATE[form], N - k_min + 1)
    with torch.no_grad():
        gate.outer.weight.mul_(30)
    return ACM(gate, learners, name=kind, k_min=k_min, layout=None, cost=1.0, dropout=0.0).eval()


def at_k(eager: ACM, compiled: nn.Module, x: Tensor, k_lo: int, k_hi: int) -> Callable[[], object]:
    """A call of the compiled ACM with k between these bounds; setting them is a few microseconds of the time."""

    def call() -> object:
        eager.k_lo.fill_(k_lo)
        eager.k_hi.fill_(k_hi)
        return compiled(x)

    return call


def bounds_of(site: ACM) -> dict[str, tuple[int, int]]:
    """The bounds on k of every row."""
    return {f"{k / N:.2f}": (k, k) for k in range(site.k_min, N + 1)} | {"mixed": (site.k_min, N)}


def site_error(site: ACM, x: Tensor, k_lo: int, k_hi: int) -> float:
    """Relative norm of the error against the float64 reference with the same k."""
    from acm_compiler.acm.ops import cast_weights
    from acm_compiler.acm.reference import run_learners

    site.k_lo.fill_(k_lo)
    site.k_hi.fill_(k_hi)
    k = site.choose(x, x.shape[:-1])
    return relative_error(site(x), run_learners(x.double(), k, cast_weights(site.learners.weights(), torch.float64)))


def vit(batch: int, rounds: int, *, dtype: torch.dtype) -> None:
    """All of ViT-B/16 with drawn weights; every token at one k, and mixed."""
    dense, (x,) = drawn("vit", batch=batch)
    dense, x = dense.to(dtype).eval(), x.to(dtype)
    model = converted(dense, (x[:1],))
    compiled = torch.compile(model, backend="acm")
    base = torch.compile(dense)
    rows = []
    for k in (1, 2, 3, 4, None):
        acm.set_k(model, k)
        with acm.record(model) as usage:
            expected = model(x)
        error = relative_error(compiled(x), expected)
        calls = {"dense": lambda: base(x), "acm compiled": lambda: compiled(x)}
        if k == 2:
            calls |= {"dense eager": lambda: dense(x), "acm eager": lambda: model(x)}
            if dtype == torch.float32 and (quantized := int8(dense)) is not None:
                calls["dense int8"] = lambda: quantized(x)
        for name, timing in interleave(calls, base="dense", rounds=rounds, warmup=1).items():
            if name != "dense" or k == 1:
                rows.append(
                    [name, "mixed" if k is None else k, *cells(timing), f"{usage.model_share:.3f}", f"{error:.1e}"]
                )
                print("\t".join(map(str, rows[-1])), flush=True)
    headings = ("contender", "k", "ms", "ratio", "q1", "q3", "MAC ratio", "compiled to eager")
    print("\n" + tabulate(rows, headers=headings, tablefmt="github", disable_numparse=True))


def cells(timing: Timing) -> list[str]:
    """A timing as table cells."""
    return [f"{timing.time_ms:.1f}", *(f"{value:.3f}" for value in (timing.ratio, timing.ratio_q1, timing.ratio_q3))]


if __name__ == "__main__":
    main()
