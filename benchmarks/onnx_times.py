"""Times of ONNX files in ONNX Runtime, one thread: the dense original, the budget as an input, and fixed k.

python benchmarks/onnx_times.py
"""

import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from torch import nn
from transformers import BertConfig, BertModel

import acm_compiler as acm

ROUNDS = 9


class Mlps(nn.Module):
    """Two residual MLPs of the width of ViT-B."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def bert() -> tuple[nn.Module, list[torch.Tensor]]:
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    return BertModel(config, add_pooling_layer=False), [torch.randint(0, 30_000, (8, 128)) for _ in range(8)]


def mlps() -> tuple[nn.Module, list[torch.Tensor]]:
    return Mlps(), [torch.randn(4, 197, 768) for _ in range(8)]


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    torch.set_num_threads(1)
    for build in (bert, mlps):
        torch.manual_seed(0)
        model, batches = build()
        model.eval()
        x = batches[0]
        with tempfile.TemporaryDirectory() as name:
            measure(build.__name__, model, batches, x, Path(name))


def measure(title: str, model: nn.Module, batches: list[torch.Tensor], x: torch.Tensor, folder: Path) -> None:
    torch.onnx.export(model, (x,), folder / "dense.onnx", dynamo=True, verbose=False, external_data=False)
    rewritten = acm.rewrite(model, acm.plan(model, x, sites="mlp"))
    acm.calibrate(rewritten, batches, tokens=8_000)
    count = next(iter(acm.sites(rewritten).values())).count
    runs = {"dense": (session(folder / "dense.onnx"), None)}
    masked = session(acm.export(rewritten, folder / "masked", x, "onnx"))
    runs |= {f"budget {budget}": (masked, budget) for budget in (0.5, 1.0)}
    for k in (count // 4, count // 2, count):
        runs[f"k = {k} of {count}"] = (session(acm.export(rewritten, folder / str(k), x, "onnx", fixed_k=k)), None)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):  # in turn, so that other work on the machine meets all alike
        for name, (run, budget) in runs.items():
            given = {run.get_inputs()[0].name: x.numpy()}
            if budget is not None:
                given["budget"] = torch.tensor(budget).numpy()
            start = time.perf_counter()
            run.run(None, given)
            times[name].append(time.perf_counter() - start)
    dense = min(times["dense"])
    for name, measured in times.items():
        sizes = {"dense": "dense.onnx"}.get(name) or ("masked" if "budget" in name else name.split()[2]) + "/model.onnx"
        size = (folder / sizes).stat().st_size / 1e6
        print(
            f"{title} | {name} | {min(measured) * 1e3:.1f} ms | {min(measured) / dense:.2f} | {size:.1f} MB", flush=True
        )


if __name__ == "__main__":
    main()
