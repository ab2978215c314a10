"""torch.compile with this package's backend, then one graph for every budget, and a budget for each example."""

import torch
from torch import nn

import acm_compiler as acm


class Classifier(nn.Module):
    """Two transformer layers over 16 vectors, and a head with four classes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


original = Classifier().eval()
batches = [torch.randn(16, 16, 32) for _ in range(16)]
x = batches[0]
model = acm.rewrite(original, acm.plan(original, x))
acm.calibrate(model, batches, tokens=2_000)
acm.finalize(model)  # frees the dense regions: from here on the model only serves

fast = torch.compile(model, backend="acm", dynamic=True)
print(acm.explain(fast, x))  # what runs each ACM, and why
with torch.no_grad():
    for budget in (0.3, 0.6, 1.0):  # a budget is a value in the graph: nothing is compiled again
        acm.set_budget(model, budget)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)
    with acm.batch(model, budgets=[0.3] * 8 + [1.0] * 8):  # half of the batch cheap, half of it dear
        y = fast(x)
print(f"{len(y)} answers at two budgets in one call")
