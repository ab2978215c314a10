"""FSDP2 in a loop of your own: torchrun --nproc-per-node 2 examples/fsdp.py

Every process converts the same weights on the same batches; then each keeps a part of every parameter, of its gradient
and of what the optimizer holds for it.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import acm_compiler as acm

BUDGET, ACCUMULATE = 0.5, 2


class Classifier(nn.Module):
    """Two transformer layers over 16 vectors, and a head with four classes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


def examples(count, seed):
    """Noise around one direction per class, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (count,), generator=generator)
    return torch.randn(count, 16, 32, generator=generator) + torch.eye(4, 32)[label][:, None], label


def evenly(parameter):
    """Cut an axis that all processes have an equal part of; weights of learners begin with N, which may be too few."""
    return next((Shard(axis) for axis, size in enumerate(parameter.shape) if size % world == 0), None)


distributed.init_process_group("gloo")  # nccl on GPUs
rank, world = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(0)  # the same weights everywhere, as a checkpoint gives them
original = Classifier().eval()
batches = [examples(16, seed)[0] for seed in range(12)]
model = acm.rewrite(original, acm.plan(original, batches[0], sites="mlp"))
acm.calibrate(model, batches, tokens=1_500, budgets=[BUDGET])  # before fully_shard: it fits whole parameters
acm.finalize(model)  # the dense regions are not needed any more
acm.set_budget(model, BUDGET)  # where the gates start from
acm.relax(model.train(), temperature=0.8)

mesh = init_device_mesh("cpu", (world,))  # "cuda" on GPUs
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (*model.layers.layers, model):  # a module around each ACM, never a gate or learners alone
    fully_shard(layer, mesh=mesh, mp_policy=policy, shard_placement_fn=evenly)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
whole = sum(parameter.numel() for parameter in model.parameters())
here = sum(parameter.to_local().numel() for parameter in model.parameters())

torch.manual_seed(1 + rank)  # every process draws noise of its own
for step in range(4):
    for part in range(ACCUMULATE):
        x, label = examples(8, 1000 + (step * ACCUMULATE + part) * world + rank)
        model.set_requires_gradient_sync(part == ACCUMULATE - 1)
        logits = model(x).float()
        extra = acm.losses(model, budget=BUDGET)
        loss = F.cross_entropy(logits, label) + 0.1 * extra["budget"] + 0.05 * (extra["entropy"] + extra["diversity"])
        (loss / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

acm.relax(model.eval(), None)
acm.recalibrate(model, batches, tokens=1_500)  # all processes, on the same batches
acm.save(model, os.environ.get("OUT", "converted/"))  # all processes: parameters are gathered, the first one writes
if rank == 0:
    print(f"trained by {world} processes, each with {here / whole:.2f} of the parameters; saved")
distributed.barrier()
distributed.destroy_process_group()
