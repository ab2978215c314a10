"""Models with drawn weights, and ACMs whose gates choose every k: what takes time does not depend on the values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.acm import ACM

N = 4
VOCABULARY = 30_000
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


class OneTensor(nn.Module):
    """A model of transformers that gives one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).last_hidden_state


def drawn(name: str, *, batch: int = 1, tokens: int = 512) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A dense model and its inputs: ViT-B/16, or transformers' own of these sizes.

    "bert": MiniLM-L6, 128 tokens an example. "decoder": six layers of SmolLM2-135M, so many tokens at once. "wav2vec2":
    the base size, five seconds of sound.
    """
    if name == "vit":
        from torchvision.models import vit_b_16

        dense = vit_b_16()
        dense.heads.head.weight.data.normal_(std=0.02)  # torchvision starts it at zero, and zeros are always right
        return dense, (torch.randn(batch, 3, 224, 224),)
    import transformers

    if name == "bert":
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        bert = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
        return OneTensor(bert), (torch.randint(0, VOCABULARY, (batch, 128)),)
    if name == "decoder":
        config = transformers.LlamaConfig(**SMOLLM2, num_hidden_layers=6, vocab_size=49_152, use_cache=False)
        return OneTensor(transformers.LlamaModel(config)), (torch.randint(0, VOCABULARY, (1, tokens)),)
    return OneTensor(transformers.Wav2Vec2Model(transformers.Wav2Vec2Config())), (torch.randn(1, 80_000),)


@torch.no_grad()
def converted(dense: nn.Module, x: tuple[Tensor, ...], sites: Sequence[str] = ("mlp", "attn")) -> nn.Module:
    """A copy of the model with ACMs of N learners, whose gates spread tokens over all k."""
    plan = acm.plan(dense.eval(), x, sites=tuple(sites), learners=N, init="random")
    model = acm.rewrite(dense, plan).eval()
    for site in acm.sites(model).values():
        site.gate.outer.weight.mul_(30)
    return model


@torch.no_grad()
def bias_to(site: ACM, x_TD: Tensor, share: float) -> None:
    """Move the gate's last biases until these tokens run this mean k/N by its own choice."""
    bias = site.gate.outer.bias.clone()
    slope, low, high = torch.linspace(-1, 1, len(bias)).to(bias), -100.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        site.gate.outer.bias.copy_(bias + middle * slope)
        low, high = (middle, high) if mean_k(site, x_TD) < share * site.count else (low, middle)


def mean_k(site: ACM, x_TD: Tensor) -> float:
    """The mean k that the gate chooses by itself for tokens of one example."""
    site.k_lo.fill_(site.k_min)
    site.k_hi.fill_(site.count)
    return float(site.choose(x_TD, torch.Size((1, len(x_TD)))).float().mean())
