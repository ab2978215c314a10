"""Query, key, value and output projections are known, however attention is written."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from acm_compiler.passes.capture.capture import capture
from tests.helpers.captures import find_sites
from tests.helpers.models import HEADS, TOKENS, WIDTH, Stack, example, heads, merged

HEAD = WIDTH // HEADS


class Projected(nn.Module):
    """x + o(attention(q(x), k(x), v(x))), attention given as a function of heads."""

    def __init__(self, attention, *, kv_width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_width), nn.Linear(WIDTH, kv_width)
        self.o, self.norm, self.attention = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(HEAD), attention
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x):
        return x + self.o(self.attention(self, self.q(x), self.k(x), self.v(x)))


def sdpa(_, q, k, v):
    return merged(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))


def by_keyword(_, q, k, v):
    return merged(F.scaled_dot_product_attention(key=heads(k), value=heads(v), query=heads(q), is_causal=True))


def written_out(_, q, k, v):
    scores = heads(q) @ heads(k).transpose(-2, -1) / math.sqrt(HEAD)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return merged(F.dropout(scores.masked_fill(~mask, -1e9).softmax(-1), 0.1, training=False) @ heads(v))


def keys_first(_, q, k, v):
    """scores[k, q], normalised over the keys' axis; values from the left."""
    weights = torch.softmax(heads(k) @ heads(q).mT, dim=-2)
    return merged((heads(v).mT @ weights).mT)


def by_einsum(_, q, k, v):
    q, k, v = (part.unflatten(-1, (HEADS, HEAD)) for part in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bkhd,bhqk->bqhd", v, weights).flatten(-2)


def keys_first_by_einsum(_, q, k, v):
    q, k, v = (part.unflatten(-1, (HEADS, HEAD)) for part in (q, k, v))
    weights = torch.einsum("bkhd,bqhd->bhqk", k, q).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)


def softmax_written_out(_, q, k, v):
    scores = heads(q) @ heads(k).mT
    return merged(torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ heads(v))


def exponentials_divided_by_their_sum(_, q, k, v):
    weights = torch.exp(heads(q) @ heads(k).mT)
    return merged(weights / weights.sum(dim=-1, keepdim=True) @ heads(v))


def pooled_queries(_, q, k, v):
    queries = heads(q).unflatten(2, (TOKENS, 1)).max(dim=3).values
    return merged(F.scaled_dot_product_attention(queries, heads(k), heads(v)))


def axes_moved(_, q, k, v):
    q, k, v = (part.unflatten(-1, (HEADS, HEAD)).moveaxis(2, 1) for part in (q, k, v))
    return merged(F.scaled_dot_product_attention(q, k, v))


def by_baddbmm(_, q, k, v):
    q, k, v = (heads(part).flatten(0, 1) for part in (q, k, v))
    bias = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.5).softmax(-1)
    return merged(torch.bmm(weights, v).unflatten(0, (-1, HEADS)))


def rotary(s, q, k, v):
    """Queries and keys normed, then rotated by position."""

    def turned(x):
        angle = torch.arange(x.shape[-2])[:, None] * torch.ones(HEAD)
        a, b = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()

    q, k = turned(s.norm(heads(q))), turned(s.norm(heads(k)))
    return merged(F.scaled_dot_product_attention(q, k, heads(v)))


def grouped(_, q, k, v):
    k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2).repeat_interleave(2, 1) for part in (k, v))
    return merged(F.scaled_dot_product_attention(heads(q), k, v))


def gated_output(_, q, k, v):
    return sdpa(_, q, k, v) * torch.sigmoid(v)


def local_enhanced(_, q, k, v):
    """The values are also added to the result, moved along the tokens."""
    return sdpa(_, q, k, v) + v.roll(1, 1)


def queries_added(_, q, k, v):
    """The queries are also added to what they attended to, as MViT's pooled ones are."""
    return merged((heads(q) @ heads(k).mT).softmax(-1) @ heads(v) + heads(q))


def queries_added_in_place(_, q, k, v):
    """The same for all tokens but the first."""
    mixed = (heads(q) @ heads(k).mT).softmax(-1) @ heads(v)
    mixed[:, :, 1:] += heads(q)[:, :, 1:]
    return merged(mixed)


def heads_mixed(s, q, k, v):
    """A linear over the heads of the scores, another over those of the weights."""
    scores = s.before((heads(q) @ heads(k).mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    weights = s.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return merged(weights @ heads(v))


def two_softmaxes(_, q, k, v):
    scores = heads(q) @ heads(k).mT
    weights = 0.7 * scores.softmax(-1) + 0.3 * scores.abs().softmax(-1)
    return merged((weights / weights.sum(-1, keepdim=True)) @ heads(v))


def without_scores(_, q, k, v):
    """softmax(k) times v first: a context that the queries read."""
    return merged(heads(q) @ (heads(k).softmax(-2).mT @ heads(v)))


def capped_below(_, q, k, v):
    scores = torch.max(heads(q) @ heads(k).mT, torch.tensor(-3.0))
    return merged(scores.softmax(-1) @ heads(v))


def keys_written_into_place(_, q, k, v):
    keys = torch.empty_like(heads(k))
    keys[..., :2] = heads(k)[..., :2]
    keys[..., 2:] = heads(k)[..., 2:]
    return merged(F.scaled_dot_product_attention(heads(q), keys, heads(v)))


def heads_in_the_batch(_, q, k, v):
    q, k, v = (heads(part).contiguous().view(-1, TOKENS, HEAD) for part in (q, k, v))
    mixed = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
    return merged(mixed.view(-1, HEADS, TOKENS, HEAD))


def activated(s, q, k, v):
    return F.hardswish(sdpa(s, q, k, v))


WAYS = [sdpa, by_keyword, written_out, keys_first, by_einsum, keys_first_by_einsum, axes_moved, by_baddbmm, rotary]
WAYS += [gated_output, local_enhanced, queries_added, queries_added_in_place]
WAYS += [
    heads_mixed,
    two_softmaxes,
    without_scores,
    softmax_written_out,
    exponentials_divided_by_their_sum,
    pooled_queries,
    capped_below,
    keys_written_into_place,
    heads_in_the_batch,
    activated,
]


def roles_of(model):
    sites, skips = find_sites(model.eval(), capture(model, example()))
    return {site.name.removeprefix("blocks.0."): site.role for site in sites}, skips


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_projections_are_told_by_where_their_values_go(way):
    assert roles_of(Stack(Projected(way)))[0] == {"q": "q", "k": "k", "v": "v", "o": "o"}


class Latents(nn.Module):
    """Learned latents read the tokens, as in a Perceiver: the queries depend on no input."""

    def __init__(self, attention) -> None:
        super().__init__()
        self.latents, self.attention = nn.Parameter(torch.randn(3, WIDTH)), attention
        self.to_q, self.to_k, self.to_v, self.to_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        return latents + self.to_o(self.attention(self, self.to_q(latents), self.to_k(x), self.to_v(x)))


@pytest.mark.parametrize("way", [sdpa, softmax_written_out, by_einsum, keys_first_by_einsum])
def test_what_learned_latents_read_are_keys_and_values(way):
    found, skips = roles_of(Stack(Latents(way)))
    assert found == {"to_k": "k", "to_v": "v", "to_o": "o"}
    reasons = {skip.name: skip.reason for skip in skips}
    assert reasons["blocks.0.to_q"] == "its input does not depend on the model's inputs"


def test_mvit_with_pooled_queries_has_its_output_projections():
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    pooled = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_q": [1, 1, 1], "stride_kv": [1, 2, 2]}
    blocks = [MSBlockConfig(num_heads=1, input_channels=8, output_channels=8, **pooled) for _ in range(2)]
    second = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    with torch.device("meta"):
        model = MViT((16, 16), 4, blocks, **second).eval()
        sites, _ = find_sites(model, capture(model, torch.zeros(1, 3, 4, 16, 16)))
    found = {site.name: (site.role or site.kind, site.residual) for site in sites}
    parts = {"attn.qkv": ("qkv", False), "attn.project": ("o", True), "mlp": ("mlp", True)}
    assert found == {f"blocks.{i}.{name}": what for i in range(2) for name, what in parts.items()}


def test_heads_that_share_keys_and_values_make_no_difference():
    assert roles_of(Stack(Projected(grouped, kv_width=WIDTH // 2)))[0] == {"q": "q", "k": "k", "v": "v", "o": "o"}


class Packed(nn.Module):
    """x + o(attention) with `parts` of q, k, v in one linear, the others in their own."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        self.parts, self.packed = parts, nn.Linear(WIDTH, len(parts) * WIDTH)
        self.own = nn.ModuleDict({part: nn.Linear(WIDTH, WIDTH) for part in "qkv" if part not in parts})
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        split = self.packed(x).unflatten(-1, (len(self.parts), WIDTH)).unbind(-2)
        part = dict(zip(self.parts, split, strict=True)) | {name: own(x) for name, own in self.own.items()}
        return x + self.o(sdpa(self, part["q"], part["k"], part["v"]))


@pytest.mark.parametrize("parts", ["qkv", "kv", "qk"])
def test_packed_projections_are_one_site_of_the_packed_width(parts):
    model = Stack(Packed(parts)).eval()
    sites, _ = find_sites(model, capture(model, example()))
    roles = {site.name.removeprefix("blocks.0."): site.role for site in sites}
    assert roles == {"packed": parts, "o": "o"} | {f"own.{part}": part for part in "qkv" if part not in parts}
    assert {site.d_out for site in sites if site.role == parts} == {len(parts) * WIDTH}


def test_queries_packed_with_values_alone_are_skipped():
    roles, skips = roles_of(Stack(Packed("qv")))
    assert roles == {"own.k": "k", "o": "o"}
    assert {skip.name: skip.reason for skip in skips}["blocks.0.packed"].startswith("packed projection (qv)")


def test_projections_packed_with_an_mlp_are_skipped_with_the_linear_that_reads_the_rest():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.o, self.down = (
                nn.Linear(WIDTH, 5 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(2 * WIDTH, WIDTH),
            )

        def forward(self, x):
            q, k, v, hidden = self.into(x).split([WIDTH, WIDTH, WIDTH, 2 * WIDTH], -1)
            return x + self.o(sdpa(self, q, k, v)) + self.down(F.gelu(hidden))

    roles, skips = roles_of(Stack(Fused()))
    assert roles == {"o": "o"}
    reasons = {skip.name: skip.reason for skip in skips}
    assert reasons["blocks.0.into"].startswith("packed with another layer (qkv): blocks.0.down reads a part of it")


def test_a_linear_behind_attention_and_something_else_is_no_output_projection():
    class Behind(Projected):
        def __init__(self):
            super().__init__(sdpa)
            self.beside, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.o(torch.cat([sdpa(self, self.q(x), self.k(x), self.v(x)), self.beside(x)], -1))

    assert roles_of(Stack(Behind()))[0] == {"q": "q", "k": "k", "v": "v"}


class Weighed(nn.Module):
    """The mean of a network's tokens by learned weights: embed, x + mlp(x), softmax(score(x)) @ x."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.down(F.gelu(self.up(x)))
        return self.score(x).mT.softmax(-1) @ x


def test_an_embedding_whose_tokens_are_weighed_at_the_end_is_no_value_projection():
    found, skips = roles_of(Stack(Weighed()))
    assert "embed" not in found
    reasons = {skip.name: skip.reason for skip in skips}
    assert reasons["blocks.0.embed"] == "neither a layer of an MLP nor a projection of attention"


def test_a_softmax_over_a_window_makes_no_key_of_the_linear_that_chooses_it():
    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.choice, self.v = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            around = torch.stack([self.v(x).roll(shift, 1) for shift in (-1, 0, 1)], -1)
            return x + (around @ self.choice(x).softmax(-1)[..., None]).squeeze(-1)

    assert roles_of(Stack(Window()))[0] == {"v": "v"}


def test_rows_of_one_parameter_used_apart_are_projections_of_their_own():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3 * WIDTH, WIDTH)), nn.Parameter(torch.zeros(3 * WIDTH))
            self.o = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            w, b = self.weight, self.bias.split(WIDTH)
            q, k = F.linear(x, w[:WIDTH], b[0]), F.linear(x, w[WIDTH : 2 * WIDTH], b[1])
            return x + self.o(sdpa(self, q, k, F.linear(x, w.chunk(3)[2], b[2])))

    sites, _ = find_sites(model := Stack(Rows()).eval(), capture(model, example()))
    assert [(s.role, s.first[0].rows) for s in sites] == [("q", (0, 16)), ("k", (16, 32)), ("v", (32, 48)), ("o", None)]
    assert len({site.name for site in sites}) == 4


def test_projections_stacked_in_one_parameter_are_no_experts():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.o = nn.Parameter(torch.randn(3, WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.o(sdpa(self, *(F.linear(x, weight) for weight in self.weight.unbind())))

    roles, skips = roles_of(Stack(Stacked()))
    assert roles == {"o": "o"}
    reasons = {skip.reason for skip in skips if skip.name == "blocks.0.weight"}
    assert reasons == {
        f"attention {role}: its parameter holds several matrices: make each a parameter, or stack their rows in one "
        "[rows, in]"
        for role in "qkv"
    }


def test_a_classifier_after_attention_is_no_output_projection():
    class NoProjection(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            return x + sdpa(self, self.q(x), self.k(x), self.v(x))

    roles, skips = roles_of(Stack(NoProjection()))
    assert roles == {"q": "q", "k": "k", "v": "v"}
    assert "head" in {skip.name for skip in skips}


def test_a_head_behind_a_pool_by_a_learned_query_is_no_output_projection():
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.down = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, WIDTH)
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x):
            x = x + self.down(x.tanh())
            return self.head(self.norm(F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1), x, x)))

    sites, skips = find_sites(model := Pool().eval(), capture(model, torch.randn(2, TOKENS, WIDTH)))
    assert not sites
    assert {skip.name: skip.reason for skip in skips}["head"].startswith("classifier")


def test_an_attention_that_is_the_whole_model_keeps_its_output_projection():
    class Whole(Projected):
        def forward(self, x):
            return self.o(self.attention(self, self.q(x), self.k(x), self.v(x)))

    sites, _ = find_sites(model := Whole(written_out).eval(), capture(model, torch.randn(2, TOKENS, WIDTH)))
    assert [site.role for site in sites] == ["q", "k", "v", "o"]


def test_a_bias_on_the_scores_is_no_projection():
    class Biased(Projected):
        def __init__(self):
            super().__init__(None)
            self.pair = nn.Linear(WIDTH, HEADS)

        def forward(self, x):
            bias = self.pair(x[:, :, None] + x[:, None]).permute(0, 3, 1, 2)
            q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
            return x + self.o(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))

    roles, skips = roles_of(Stack(Biased()))
    assert roles == {"q": "q", "k": "k", "v": "v", "o": "o"}
    assert {skip.name: skip.reason for skip in skips}["blocks.0.pair"].startswith("neither a layer of an MLP")


def test_queries_that_are_parameters_leave_keys_and_values_projections():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(2, WIDTH))
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x):
            q = heads(self.q(self.queries)[None].expand(len(x), -1, -1))
            weights = (q @ heads(self.k(x)).mT).softmax(-1)
            return self.o(merged(weights @ heads(self.v(x))))

    roles, skips = roles_of(Stack(Pooled()))
    assert roles == {"k": "k", "v": "v", "o": "o"}
    assert "its input does not depend on the model's inputs" in {skip.reason for skip in skips}


def test_scores_without_a_softmax_that_a_loop_writes_row_by_row_are_no_attention():
    def rows_that_read_each_other(_, q, k, v):
        w = heads(q) @ heads(k).mT
        for row in (*range(1, TOKENS),) * 8:  # 3 ** 32 ways back to the product
            w[:, :, row] = w[:, :, row] + w[:, :, row - 1]
        return merged(w @ heads(v))

    assert roles_of(Stack(Projected(rows_that_read_each_other)))[0] == {}


def test_a_router_that_reads_attention_is_no_output_projection():
    class Routed(Projected):
        def forward(self, x):
            scores = self.o(sdpa(self, self.q(x), self.k(x), self.v(x)))
            return x * scores.softmax(-1).topk(2).values.sum(-1, keepdim=True)

    roles, skips = roles_of(Stack(Routed(None)))
    assert roles == {"q": "q", "k": "k", "v": "v"}
    assert {skip.name: skip.reason for skip in skips}["blocks.0.o"].startswith("router")
