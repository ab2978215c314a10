"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py

Every process converts the same weights on the same batches, and DDP keeps them equal from then on. L_b and L_d see the
examples of all processes.
"""

import os

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import acm_compiler as acm

BUDGET = 0.5


class Classifier(nn.Module):
    """One transformer layer over 16 vectors, and a head with four classes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


def examples(count, seed):
    """Noise around one direction per class, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (count,), generator=generator)
    return torch.randn(count, 16, 32, generator=generator) + torch.eye(4, 32)[label][:, None], label


distributed.init_process_group("gloo")  # nccl on GPUs
rank, world = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(0)  # the same weights everywhere, as a checkpoint gives them
original = Classifier().eval()
batches = [examples(16, seed)[0] for seed in range(12)]
model = acm.rewrite(original, acm.plan(original, batches[0], sites="mlp"))
acm.calibrate(model, batches, tokens=1_500, budgets=[BUDGET])

acm.set_budget(model, BUDGET)  # where the gates start from
acm.relax(model.train(), temperature=0.8)  # before DDP: without it the gates get no gradient
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)  # every process draws noise of its own
for step in range(6):
    x, label = examples(16, 1000 + step * world + rank)
    logits = wrapped(x)
    extra = acm.losses(wrapped, budget=BUDGET)
    loss = F.cross_entropy(logits, label) + 0.1 * extra["budget"] + 0.05 * (extra["entropy"] + extra["diversity"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

acm.relax(model.eval(), None)
acm.recalibrate(model, batches, tokens=1_500)  # on the same batches everywhere, so that all tables are equal
acm.set_budget(model, BUDGET)
if rank == 0:
    acm.save(model, os.environ.get("OUT", "converted/"))
    print(f"trained by {world} processes, saved")
distributed.barrier()
distributed.destroy_process_group()
