"""A model, a data set and a task of your own, as examples/my_recipe.yaml names them.

From this folder: acmc rewrite --recipe my_recipe.yaml --out ../runs/my_project
"""

import torch
from torch import nn
from torch.utils.data import Dataset


class Forecaster(nn.Module):
    """Reads 24 numbers and gives the next one."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.place = nn.Parameter(0.1 * torch.randn(24, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, series):
        return self.head(self.layers(self.embed(series[..., None]) + self.place).mean(1))[:, 0]


def model(width=32):
    """The model, and an example of its input: one series."""
    torch.manual_seed(0)
    return Forecaster(width), torch.zeros(1, 24)


class Waves(Dataset):
    """Sine waves of random frequency and phase: an item is a dict of tensors without the batch axis."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(100_000 * self.seed + index)
        frequency, phase = torch.rand(2, generator=generator)
        wave = torch.sin((1 + frequency) * torch.arange(25) / 4 + 6 * phase)
        return {"series": wave[:24], "next": wave[24]}


def data(count=200, seed=0):
    """The data set; the recipe's `args` are the arguments."""
    return Waves(count, seed)


class NextNumber:
    """The task: what the model is called with, its loss, its metric."""

    metric = "mean absolute error"
    lower_is_better = True

    def inputs(self, batch):
        """The model's inputs: a tensor, a tuple of arguments, or a dict of keyword arguments."""
        return batch["series"]

    def mask(self, batch):
        """bool [batch, tokens], True at real tokens; None where there is no padding."""
        return None

    def loss(self, output, batch):
        """A scalar: the mean over the batch."""
        return (output - batch["next"]).square().mean()

    def score(self, output, batch):
        """fp32 [batch]: one value per example, whose mean over a data set is the metric."""
        return (output - batch["next"]).abs().float()

    def answer(self, output, mask=None):
        """[batch, ...]: what two models are compared by; its squared difference is the damage."""
        return output[:, None]


def task():
    """The task; nothing in it keeps state."""
    return NextNumber()
