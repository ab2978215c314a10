"""Tensor parallelism: torchrun --nproc-per-node 2 examples/tensor_parallel.py

Each process holds a part of every learner, so that all of them together run any k. All see the same tokens.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import acm_compiler as acm

distributed.init_process_group("gloo")  # nccl on GPUs
rank, world = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(0)  # the same weights and batches everywhere
layer = nn.TransformerEncoderLayer(32, 4, 128, activation="gelu", batch_first=True, norm_first=True)
original = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
batches = [torch.randn(8, 16, 32) for _ in range(12)]
model = acm.rewrite(original, acm.plan(original, batches[0], sites="mlp"))
acm.calibrate(model, batches, tokens=1_500, budgets=[0.5])
acm.set_budget(model, 0.5)
with torch.no_grad():
    expected = model(batches[0])

mesh = init_device_mesh("cpu", (world,))  # "cuda" on GPUs
model = parallelize_module(model, mesh, {name: acm.SplitLearners() for name in acm.sites(model)})
with torch.no_grad():
    torch.testing.assert_close(model(batches[0]), expected)
acm.set_budget(model, 0.8)  # in all processes; so is what follows
acm.save(model, os.environ.get("OUT", "converted/"))
if rank == 0:
    print(f"split over {world} processes, saved")
distributed.barrier()
distributed.destroy_process_group()
