"""Outputs of sites only added to a value that goes around the site: patterns that look alike and differ.

In every pattern `self.f` is the site (an MLP on [batch, tokens, WIDTH]), and a head follows.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.passes.capture.capture import capture
from tests.helpers.captures import find_sites
from tests.helpers.models import TOKENS, WIDTH, Mlp, Stack, example


class Pattern(nn.Module):
    """A block around the site `f`, with some other parts to use."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.f, self.norm, self.other = Mlp(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.scale, self.mixed = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(()))
        self.places = nn.Parameter(torch.ones(TOKENS, WIDTH))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def rms(x):
    """A norm written out."""
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


def standardised(x):
    """A layer norm written out."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def highway(s, x):
    gate = torch.sigmoid(s.other(x))
    return s.f(x) * gate + x * (1 - gate)


def into_a_slice(s, x):
    out = x.clone()
    out[:, 1:] = s.f(x[:, 1:])
    return out


def windows(s, x):
    """Tokens cut in windows for the branch only, as in Swin."""
    parts = s.norm(F.pad(x, (0, 0, 0, 1))).view(-1, 2, 3, WIDTH).flatten(0, 1)
    return x + s.f(parts).view(-1, 6, WIDTH)[:, :TOKENS]


def two_streams(s, x):
    """Each of two streams is changed by what is read from the other one, as in reversible models."""
    a, b = torch.cat([x, x], -1).chunk(2, -1)
    return a + s.f(s.norm(b))


BYPASS, NORMED, NONE = (True, False), (True, True), (False, False)
PATTERNS = {
    "pre-norm": (lambda s, x: x + s.f(s.norm(x)), BYPASS),
    "post-norm": (lambda s, x: s.norm(x + s.f(x)), BYPASS),
    "the other way round": (lambda s, x: s.f(s.norm(x)) + x, BYPASS),
    "subtracted": (lambda s, x: x - s.f(x), BYPASS),
    "in place": (lambda s, x: s.f(s.norm(x)).add_(x), BYPASS),
    "scaled": (lambda s, x: torch.add(x, s.f(x), alpha=0.5), BYPASS),
    "layer scale and dropout": (lambda s, x: x + s.drop(s.scale * s.f(s.norm(x))), BYPASS),
    "addcmul": (lambda s, x: torch.addcmul(x, s.scale, s.f(x)), BYPASS),
    "gated by another value": (lambda s, x: x + torch.sigmoid(s.other(x)) * s.f(x), BYPASS),
    "parallel branches": (lambda s, x: (s.other(s.norm(x)) + s.f(s.norm(x))) + x, BYPASS),
    "bypass inside a sum": (lambda s, x: s.f(s.norm(x)) + (s.other(x) + x), BYPASS),
    "bypass through dropout and cast": (lambda s, x: s.drop(x.double().float()) + s.f(x), BYPASS),
    "bypass of the normed value": (lambda s, x: (lambda h: h + s.f(h))(s.norm(x)), BYPASS),
    "bypass with a norm of its own": (lambda s, x: s.norm2(x) + s.f(s.norm(x)), BYPASS),
    "windows": (windows, BYPASS),
    "flattened tokens": (lambda s, x: x + s.f(s.norm(x).flatten(0, 1)).view_as(x), BYPASS),
    "from further up": (lambda s, x: x + s.f(s.norm2(s.other(s.norm(x)))), BYPASS),
    "joined once for the branch and once to go around": (
        lambda s, x: (lambda h: torch.cat([x, h], 1) + s.f(torch.cat([x, h], 1)))(s.norm2(x)),
        BYPASS,
    ),
    "the first token of what is read": (lambda s, x: x[:, :1] + s.f(s.norm(x)[:, :1]), BYPASS),
    "two streams": (two_streams, BYPASS),
    "joined the other way round": (
        lambda s, x: (lambda h: torch.cat([h, x], 1) + s.f(torch.cat([x, h], 1)))(s.norm2(x)),
        NONE,
    ),
    "a parameter that its input holds too": (lambda s, x: s.f(x + s.places) + s.places.expand_as(x), NONE),
    "norm on the branch": (lambda s, x: x + s.norm(s.f(x)), NORMED),
    "rms norm written out on the branch": (lambda s, x: x + s.scale * rms(s.f(x)), NORMED),
    "layer norm written out on the branch": (lambda s, x: x + standardised(s.f(x)), NORMED),
    "f.normalize on the branch": (lambda s, x: x + F.normalize(s.f(x), dim=-1), NORMED),
    "nothing": (lambda s, x: s.f(s.norm(x)), NONE),
    "scaled by an einsum": (lambda s, x: x + torch.einsum("bsd,d->bsd", s.f(x), s.scale), BYPASS),
    "mixed with other tokens by an einsum": (
        lambda s, x: x + torch.einsum("bsd,st->btd", s.f(x), torch.eye(x.shape[1])),
        NONE,
    ),
    "added to a parameter": (lambda s, x: s.f(x) + s.scale, NONE),
    "added to another branch": (lambda s, x: s.norm(s.f(x) + s.other(x)), NONE),
    "added to the mean over tokens": (lambda s, x: s.f(x) + x.mean(1, keepdim=True).expand_as(x), NONE),
    "added to a shifted value": (lambda s, x: s.f(x) + x.roll(1, 1), NONE),
    "added to itself": (lambda s, x: (lambda y: s.norm(y + y))(s.f(x)), NONE),
    "multiplied": (lambda s, x: x * s.f(x), NONE),
    "multiplied, then added": (lambda s, x: x + x * s.f(x), BYPASS),
    "activated before the sum": (lambda s, x: x + F.softplus(s.f(x)), NONE),
    "shifted before the sum": (lambda s, x: x + torch.cos(s.f(x)), NONE),
    "divides": (lambda s, x: x + x / s.f(x), NONE),
    "highway": (highway, NONE),
    "chosen instead": (lambda s, x: torch.where(x > 0, s.f(x), x), NONE),
    "lerp towards the branch": (lambda s, x: torch.lerp(x, s.f(x), 0.3), BYPASS),
    "lerp from the branch": (lambda s, x: torch.lerp(s.f(x), x, 0.3), NONE),
    "factor of an addcmul": (lambda s, x: torch.addcmul(s.other(x), s.f(x), x), NONE),
    "written into a slice": (into_a_slice, NONE),
    "for one token, the others beside": (
        lambda s, x: x + s.scale * torch.cat([s.f(x[:, :1]), s.norm(x)[:, 1:]], 1),
        BYPASS,
    ),
    "stacked with another branch and summed": (lambda s, x: x + torch.stack([s.f(x), s.other(x)]).sum(0), BYPASS),
    "concatenated": (lambda s, x: torch.cat([x, s.f(x)], 1), NONE),
    "also used without the bypass": (lambda s, x: (lambda y: x + y + s.other(y))(s.f(x)), NONE),
    "used by a later linear first": (lambda s, x: x + s.other(s.f(x)), NONE),
}


def found(model, inputs):
    sites, _ = find_sites(model, capture(model.eval(), inputs))
    return next(site for site in sites if site.kind == "mlp")


@pytest.mark.parametrize("name", PATTERNS)
def test_a_bypass_is_told_from_what_looks_like_one(name):
    forward, expected = PATTERNS[name]
    site = found(Stack(Pattern(forward)), example())
    assert (site.residual, site.residual_norm) == expected


def test_a_value_that_is_also_returned_needs_its_learners():
    class Returned(Stack):
        def forward(self, x):
            x = self.embed(x)
            branch = self.blocks[0](x)
            return self.head(x + branch), branch

    assert not found(Returned(Mlp()), example()).residual


def test_a_shared_site_has_a_bypass_only_if_every_call_has():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.norm = Mlp(), nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(self.f(x + self.f(x)))

    site = found(Stack(Uneven()), example())
    assert (site.calls, site.residual) == (2, False)


def test_the_decoder_of_an_encoder_decoder_has_its_own_bypasses():
    with torch.device("cpu"):
        model = nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True).eval()
    from acm_compiler.passes.capture.normalize import normalize

    normalize(model)
    graph = capture(model, (torch.randn(2, 4, WIDTH), torch.randn(2, 3, WIDTH)))
    sites, _ = find_sites(model, graph)
    told = {site.name: site.residual for site in sites if site.role in ("o", None)}
    assert told == {
        "encoder.layers.0.self_attn.out_proj": True,
        "encoder.layers.0.linear2": True,
        "decoder.layers.0.self_attn.out_proj": True,
        "decoder.layers.0.multihead_attn.out_proj": True,
        "decoder.layers.0.linear2": True,
    }
