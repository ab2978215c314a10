"""From a trained model to one that serves every compute budget, in a few seconds on a CPU."""

import torch
from torch import nn

import acm_compiler as acm


class Classifier(nn.Module):
    """One transformer layer over 32 tokens, and a head with ten classes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)).mean(1))


original = Classifier().eval()  # your own trained model goes here
batches = [torch.randint(1000, (16, 32)) for _ in range(24)]  # inputs as the model takes them; no labels
x = batches[0]

plan = acm.plan(original, x)  # finds the sites; nothing is changed yet
print(plan)  # the cost report
model = acm.rewrite(original, plan)  # a copy with ACMs; its outputs are the original's, to rounding
acm.calibrate(model, batches, tokens=5_000)  # fits learners and gates, measures the budget table

acm.set_budget(model, 0.4)  # spend 40 % of the learners' MACs
with torch.no_grad(), acm.record(model) as usage:
    y = model(x)
print(usage)  # what was spent, and the mean k of every site

acm.save(model, "converted/")  # safetensors and JSON
loaded = acm.load("converted/", base_model=original)  # your own code builds a class of your own
with torch.no_grad():
    torch.testing.assert_close(loaded(x), y)  # at the same budget, which was saved too
