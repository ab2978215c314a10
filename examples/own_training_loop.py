"""A training loop of your own: the task's loss plus the three terms that lead the gates to a budget."""

import torch
from torch import nn
from torch.nn import functional as F

import acm_compiler as acm

BUDGET = 0.5


class Classifier(nn.Module):
    """Two transformer layers over 16 vectors, and a head with four classes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 128, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


def examples(count):
    """Noise around one direction per class, and the classes."""
    label = torch.randint(4, (count,))
    return torch.randn(count, 16, 32) + torch.eye(4, 32)[label][:, None], label


original = Classifier().eval()
batches = [examples(16) for _ in range(16)]
model = acm.rewrite(original, acm.plan(original, batches[0][0], sites="mlp"))
# learners and gates start from the closed form
acm.calibrate(model, [x for x, _ in batches], tokens=2_000, budgets=[BUDGET])

# after rewrite and calibrate, both of which make new parameters
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
acm.set_budget(model, BUDGET)  # where the gates start from
acm.relax(model.train(), temperature=0.8)  # train() samples the gates, eval() stays deterministic
for step, (x, label) in enumerate(batches):
    logits = model(x)
    extra = acm.losses(model, budget=BUDGET)  # of the forward above: {"budget", "entropy", "diversity"}
    loss = F.cross_entropy(logits, label) + 0.1 * extra["budget"] + 0.05 * (extra["entropy"] + extra["diversity"])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}, of it the distance to the budget {extra['budget'].item():.3f}")
acm.relax(model.eval(), None)

acm.recalibrate(model, [x for x, _ in batches], tokens=2_000)  # the gates have moved: measure the budgets again
acm.set_budget(model, BUDGET)
with torch.no_grad(), acm.record(model) as usage:
    model(batches[0][0])
print(f"budget {usage.budget:.2f}, {usage.model_share:.0%} of the dense model's MACs")
