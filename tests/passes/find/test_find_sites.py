"""Sites are found in models as users write and publish them: every one once, and nothing else."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.passes.capture.capture import capture
from acm_compiler.passes.capture.export import capture_exported
from acm_compiler.passes.capture.normalize import normalize
from acm_compiler.passes.find.count_macs import count_macs
from acm_compiler.passes.find.dataflow import build_dataflow
from acm_compiler.passes.find.skips import kept_dense
from acm_compiler.site import Site
from tests.helpers import models
from tests.helpers.captures import find_sites
from tests.helpers.models import HIDDEN, WIDTH, Mlp, PostNorm, Residual, Stack, example

CLASSIFIER = "classifier: its output has no bypass and is the model's prediction"


def look(model, inputs):
    """Sites and skips of the model in eval mode, nn.MultiheadAttention unpacked."""
    normalize(model.eval())
    return find_sites(model, capture(model, inputs))


def told(site: Site) -> str:
    """A site in one line: name, kind or role, activation, widths, runs, bypass, graft."""
    what = site.role or site.kind
    widths = ">".join(str(w) for w in (site.d_in, site.dense_width, site.d_out) if w is not None)
    bypass = "bypass" if site.residual and not site.residual_norm else "normed" if site.residual else "none"
    return f"{site.name} {what} {site.act} {widths} {site.calls}x{site.tokens} {bypass} {site.graft.kind}"


def sites_of(model, inputs) -> list[str]:
    return [told(site) for site in look(model, inputs)[0]]


def in_blocks(lines: str, blocks: int = 2) -> list[str]:
    """The lines once per block, `#` standing for its number."""
    return [line.strip().replace("#", str(i)) for i in range(blocks) for line in lines.strip().splitlines()]


PUBLISHED = {
    "torchvision_vit": in_blocks("""
        encoder.layers.encoder_layer_#.self_attention.q_proj q identity 32>32 1x34 none W
        encoder.layers.encoder_layer_#.self_attention.k_proj k identity 32>32 1x34 none W
        encoder.layers.encoder_layer_#.self_attention.v_proj v identity 32>32 1x34 none W
        encoder.layers.encoder_layer_#.self_attention.out_proj o identity 32>32 1x34 bypass W
        encoder.layers.encoder_layer_#.mlp mlp gelu 32>64>32 1x34 bypass W"""),
    "hf_vit": in_blocks("""
        vit.layers.#.attention.q_proj q identity 32>32 1x34 none W
        vit.layers.#.attention.k_proj k identity 32>32 1x34 none W
        vit.layers.#.attention.v_proj v identity 32>32 1x34 none W
        vit.layers.#.attention.o_proj o identity 32>32 1x34 bypass W
        vit.layers.#.mlp mlp gelu 32>64>32 1x34 bypass W"""),
    "hf_bert": in_blocks("""
        bert.encoder.layer.#.attention.self.query q identity 32>32 1x14 none W
        bert.encoder.layer.#.attention.self.key k identity 32>32 1x14 none W
        bert.encoder.layer.#.attention.self.value v identity 32>32 1x14 none W
        bert.encoder.layer.#.attention.output.dense o identity 32>32 1x14 bypass W
        bert.encoder.layer.#.output.dense mlp gelu 32>64>32 1x14 bypass T"""),
    "hf_wav2vec2": in_blocks("""
        wav2vec2.encoder.layers.#.attention.q_proj q identity 32>32 1x78 none W
        wav2vec2.encoder.layers.#.attention.k_proj k identity 32>32 1x78 none W
        wav2vec2.encoder.layers.#.attention.v_proj v identity 32>32 1x78 none W
        wav2vec2.encoder.layers.#.attention.out_proj o identity 32>32 1x78 bypass W
        wav2vec2.encoder.layers.#.feed_forward mlp gelu 32>64>32 1x78 bypass W"""),
    "hf_gpt2": in_blocks("""
        transformer.h.#.attn.c_attn qkv identity 32>96 1x14 none W
        transformer.h.#.attn.c_proj o identity 32>32 1x14 bypass W
        transformer.h.#.mlp mlp gelu_tanh 32>128>32 1x14 bypass W"""),
    "hf_llama": in_blocks("""
        model.layers.#.self_attn.q_proj q identity 32>32 1x14 none W
        model.layers.#.self_attn.k_proj k identity 32>16 1x14 none W
        model.layers.#.self_attn.v_proj v identity 32>16 1x14 none W
        model.layers.#.self_attn.o_proj o identity 32>32 1x14 bypass W
        model.layers.#.mlp gated_mlp silu 32>64>32 1x14 bypass W"""),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_site_of_a_published_model_is_found_once_and_nothing_else(name):
    assert sites_of(*getattr(models, name)()) == PUBLISHED[name]


@pytest.mark.parametrize("batch_first", [True, False])
def test_every_site_of_torchs_own_encoder_is_found_once(batch_first):
    assert sites_of(*models.torch_encoder(batch_first=batch_first)) == in_blocks("""
        layers.#.self_attn.q_proj q identity 32>32 1x14 none W
        layers.#.self_attn.k_proj k identity 32>32 1x14 none W
        layers.#.self_attn.v_proj v identity 32>32 1x14 none W
        layers.#.self_attn.out_proj o identity 32>32 1x14 bypass W
        layers.#.linear2 mlp relu 32>64>32 1x14 bypass S""")


SKIPPED = {
    "torchvision_vit": {"conv_proj": "convolution", "heads.head": CLASSIFIER},
    "hf_bert": {"bert.pooler.dense": CLASSIFIER, "classifier": CLASSIFIER},
    "hf_wav2vec2": {
        "wav2vec2.feature_extractor.conv_layers.0.conv": "convolution",
        "wav2vec2.feature_extractor.conv_layers.1.conv": "convolution",
        "wav2vec2.feature_projection.projection": "neither a layer of an MLP nor a projection of attention",
        "wav2vec2.encoder.pos_conv_embed.conv": "convolution",
        "lm_head": CLASSIFIER,
    },
    "hf_gpt2": {"lm_head": CLASSIFIER},
    "hf_llama": {"lm_head": CLASSIFIER},
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_stays_dense_has_a_name_and_a_reason(name):
    skips = look(*getattr(models, name)())[1]
    assert [skip.name for skip in skips] == list(SKIPPED[name])
    for skip in skips:
        assert skip.reason.startswith(SKIPPED[name][skip.name])


ATTENTION = """
        blocks.{0}.q q identity 16>16 1x10 none W
        blocks.{0}.k k identity 16>16 1x10 none W
        blocks.{0}.v v identity 16>16 1x10 none W
        blocks.{0}.o o identity 16>16 1x10 {1} W"""
USERS = {
    "fused qkv": (
        lambda: Stack(models.FusedQkv()),
        """blocks.0.qkv qkv identity 16>48 1x10 none W
        blocks.0.o o identity 16>16 1x10 bypass W""",
    ),
    "einsum over bare weights": (
        lambda: Stack(models.Einsum()),
        """blocks.0.wq_q q identity 16>16 1x10 none R
        blocks.0.wk_k k identity 16>16 1x10 none R
        blocks.0.wv_v v identity 16>16 1x10 none R
        blocks.0.wo_o o identity 16>16 1x10 bypass R""",
    ),
    "functional linears": (lambda: Stack(models.Functional()), "blocks.0.w2_acm mlp silu 16>32>16 1x10 bypass R"),
    "packed glu": (lambda: Stack(models.ChunkedGlu()), "blocks.0.down gated_mlp sigmoid 16>32>16 1x10 bypass S"),
    "swiglu": (lambda: Stack(Residual(models.SwiGlu())), "blocks.0.inner gated_mlp silu 16>32>16 1x10 bypass W"),
    "escaping hidden value": (lambda: Stack(models.Escaping()), ""),
    "no bypass": (lambda: Stack(Mlp()), "blocks.0 mlp gelu 16>32>16 1x10 none W"),
    "shared block": (models.shared_block, "blocks.0.inner mlp gelu 16>32>16 3x10 bypass W"),
    "parallel": (
        lambda: Stack(models.Parallel()),
        ATTENTION.format("0.attention", "bypass") + "\nblocks.0.mlp mlp gelu 16>32>16 1x10 bypass W",
    ),
    "post-norm": (
        lambda: Stack(PostNorm(models.Attention()), PostNorm(Mlp())),
        ATTENTION.format("0.inner", "bypass") + "\nblocks.1.inner mlp gelu 16>32>16 1x10 bypass W",
    ),
    "layer scale": (
        lambda: Stack(models.LayerScale(models.Attention()), models.LayerScale(Mlp())),
        ATTENTION.format("0.inner", "bypass") + "\nblocks.1.inner mlp gelu 16>32>16 1x10 bypass W",
    ),
    "norm on the branch": (
        lambda: Stack(models.BranchNorm(models.Attention()), models.BranchNorm(Mlp())),
        ATTENTION.format("0.inner", "normed") + "\nblocks.1.inner mlp gelu 16>32>16 1x10 normed W",
    ),
}


@pytest.mark.parametrize("name", USERS)
def test_every_site_of_a_user_written_block_is_found_once_and_nothing_else(name):
    build, lines = USERS[name]
    assert sites_of(build(), example()) == [line.strip() for line in lines.strip().splitlines()]


@pytest.mark.parametrize("name", [name for name in USERS if name != "escaping hidden value"])
def test_an_export_of_a_user_written_block_shows_the_same_sites(name):
    build, lines = USERS[name]
    found = find_sites(model := build().eval(), capture_exported(model, example()))[0]
    expected = [line.split() for line in lines.strip().splitlines()]
    assert [told(site).split()[1:-1] for site in found] == [line[1:-1] for line in expected]


def test_the_activated_half_of_a_packed_mlp_comes_first():
    (site,), _ = look(Stack(models.ChunkedGlu()), example())
    assert [ref.rows for ref in site.first] == [(HIDDEN, 2 * HIDDEN), (0, HIDDEN)]
    assert {ref.weight for ref in site.first} == {"blocks.0.up.weight"}


def test_weights_stored_in_by_out_are_marked_so():
    sites, _ = look(*models.hf_gpt2())
    assert all(ref.transposed for site in sites for ref in site.refs)
    (site,), _ = look(Stack(models.Functional()), example())
    assert (site.first[0].transposed, site.last.transposed) == (False, True)
    assert (site.first[0].bias, site.last.bias) == ("blocks.0.b1", "blocks.0.b2")


def test_a_site_says_where_its_last_linear_is_called():
    (site,), _ = look(Stack(Residual(Mlp())), example())
    file, line = site.source.split(":")
    assert file == "models.py"
    with open(models.__file__, encoding="utf-8") as source:
        assert "self.down(self.act(self.up(x)))" in source.read().splitlines()[int(line) - 1]


class Between(nn.Module):
    """x + down(between(up(x)))."""

    def __init__(self, between: nn.Module, *, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(WIDTH, HIDDEN), between, nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(self.between(self.up(x)))


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Written(nn.Module):
    """x + f(this, x), with the weights of an MLP and of three branches."""

    def __init__(self, f) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.randn(HIDDEN))
        self.down, self.three = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 3 * HIDDEN)
        self.rounded, self.f = nn.Linear(HIDDEN, WIDTH, dtype=torch.bfloat16), f

    def forward(self, x):
        return x + self.f(self, x)


def three_branches(m, x):
    a, b, c = m.three(x).chunk(3, -1)
    return m.down(F.silu(a) * b * c)


NO_ACM = {
    "one weight twice": (lambda m, x: F.gelu(x @ m.up.T) @ m.up, "its layers share blocks.0.up"),
    "computed bias": (lambda m, x: m.down(F.gelu(F.linear(x, m.up, 2 * m.bias))), "its bias is computed"),
    "two types": (
        lambda m, x: m.rounded(F.gelu(x @ m.up.T).bfloat16()).float(),
        "its layers compute in different types",
    ),
    "three branches": (three_branches, "the last linear reads 3 different parts"),
}


class TokenConv(nn.Module):
    """A convolution over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN)

    def forward(self, x):
        return F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2))


NO_MLP = {
    "norm": (nn.Sequential(nn.GELU(), nn.LayerNorm(HIDDEN)), "norm over the hidden axis"),
    "convolution": (TokenConv(), "op between the linears is not element-wise: conv1d"),
    "roll": (Fn(lambda h: F.relu(h).roll(1, 1)), "op between the linears is not element-wise: roll"),
    "mean over tokens": (Fn(lambda h: F.relu(h).mean(1, keepdim=True)), "op between the linears is not element-wise"),
    "learned slope": (nn.PReLU(), "activation cannot be written down: prelu"),
    "chosen by data": (Fn(lambda h: torch.where(h > 1, h, F.relu(h))), "where (test_find_sites.py"),
    "not smooth enough": (nn.Softshrink(), "activation cannot be written down: softshrink"),
    "no number": (
        Fn(lambda h: F.relu(h) * math.inf),
        "activation cannot be written down: an operand of the activation",
    ),
    "bound by data": (Fn(lambda h: F.relu(h).clamp(max=0.5 * h)), "activation cannot be written down: a clamp's bound"),
    "nothing": (nn.Dropout(), "neither a layer of an MLP"),
}


@pytest.mark.parametrize("name", NO_ACM)
def test_an_mlp_that_no_acm_can_replace_is_skipped_with_the_reason(name):
    f, reason = NO_ACM[name]
    sites, skips = look(Stack(Written(f)), example())
    assert not sites and reason in "; ".join(skip.reason for skip in skips)


@pytest.mark.parametrize("name", NO_MLP)
def test_two_linears_that_are_no_mlp_are_skipped_with_the_reason(name):
    between, reason = NO_MLP[name]
    sites, skips = look(Stack(Between(between)), example())
    reasons = {skip.name: skip.reason for skip in skips}
    assert not sites
    assert reasons["blocks.0.up"].startswith(reason) and reasons["blocks.0.down"].startswith(reason)


def test_a_hidden_value_that_the_model_returns_is_no_mlp():
    class Tapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(FEATURES := 6, HIDDEN), nn.Linear(HIDDEN, FEATURES)

        def forward(self, x):
            hidden = F.gelu(self.up(x))
            return x + self.down(hidden), hidden

    sites, skips = look(Tapped(), example())
    assert not sites and "also returned by the model" in skips[0].reason


def test_dropout_between_the_linears_is_allowed():
    assert sites_of(Stack(Between(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))), example()) == [
        "blocks.0.down mlp relu 16>32>16 1x10 bypass T"
    ]


def test_a_chain_of_three_linears_is_no_mlp():
    head = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, WIDTH))
    sites, skips = look(Stack(Residual(head)), example())
    assert not sites
    assert [s.reason.split(";")[0] for s in skips if s.name.startswith("blocks")] == [
        "three or more linears in a row"
    ] * 3


def test_an_mlp_that_gives_the_models_answer_is_its_classifier():
    model = nn.Sequential(Residual(Mlp()), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))
    sites, skips = look(model, torch.randn(2, 5, WIDTH))
    assert [site.name for site in sites] == ["0.inner"]
    assert [(skip.name, skip.reason) for skip in skips] == [("1", CLASSIFIER), ("3", CLASSIFIER)]


def test_an_mlp_fed_by_parameters_alone_is_skipped():
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.mlp = nn.Parameter(torch.randn(5, WIDTH)), Mlp()

        def forward(self, x):
            return x + self.mlp(self.queries)

    sites, skips = look(Stack(Queries()), example())
    assert not sites
    assert "its input does not depend on the model's inputs" in {skip.reason for skip in skips}


class Adapted(nn.Module):
    """A linear with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.up(self.down(self.dropout(x)))


def test_linears_with_adapters_are_skipped_until_merged():
    attention, mlp = models.Attention(), Mlp()
    attention.q, mlp.down = Adapted(attention.q), Adapted(mlp.down)
    sites, skips = look(Stack(Residual(attention), Residual(mlp)), example())
    assert [site.role for site in sites] == ["k", "v", "o"]
    adapted = [skip.name for skip in skips if skip.reason.startswith("LoRA adapters: merge them")]
    assert adapted == [
        f"blocks.{i}.inner.{n}.{part}" for i, n in ((0, "q"), (1, "down")) for part in ("base", "down", "up")
    ]


class Experts(nn.Module):
    """Routed experts: modules that see the tokens they are chosen for, or matrices in one parameter."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.router, self.packed = nn.Linear(WIDTH, 2), packed
        self.experts = nn.ModuleList(Mlp() for _ in range(2))
        if packed:
            self.up, self.down = (nn.Parameter(0.1 * torch.randn(2, *s)) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).topk(1)
        if self.packed:
            hidden = F.gelu(torch.bmm(flat.expand(2, -1, -1), self.up))
            return x + torch.bmm(hidden, self.down).mean(0).view_as(x) * weight.view(*x.shape[:2], 1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(choice[:, 0] == i)
            out = out.index_add(0, rows, expert(flat[rows]))
        return x + out.view_as(x)


def test_attention_in_one_opaque_call_is_skipped_with_its_macs():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y, _ = F.multi_head_attention_forward(
                *(x.transpose(0, 1) for _ in range(3)),
                WIDTH,
                models.HEADS,
                self.into.weight,
                self.into.bias,
                None,
                None,
                False,
                0.0,
                self.out.weight,
                self.out.bias,
                training=False,
            )
            return x + y.transpose(0, 1)

    model = Stack(Opaque()).eval()
    graph = capture(model, example())
    sites, skips = find_sites(model, graph)
    reasons = {skip.reason for skip in skips if skip.macs == 10 * WIDTH * (4 * WIDTH + 2 * models.TOKENS)}
    assert not sites
    assert reasons == {"opaque call: multi_head_attention_forward hides its linears"}
    with FlopCounterMode(display=False) as counter:
        model(example())
    assert sum(count_macs(graph).values()) == counter.get_total_flops() / 2


@pytest.mark.parametrize("packed", [True, False])
def test_routed_experts_are_skipped(packed):
    sites, skips = look(Stack(Experts(packed=packed)), example())
    reasons = {skip.name: skip.reason for skip in skips}
    assert not sites
    assert reasons["blocks.0.router"] == "router: its output chooses experts"
    names = ("up", "down") if packed else ("experts.0.up", "experts.1.down")
    assert all(reasons[f"blocks.0.{name}"].startswith("mixture of experts") for name in names)


def test_a_weight_that_is_also_read_as_a_tensor_is_not_converted():
    class Penalised(Mlp):
        def forward(self, x):
            return super().forward(x) * self.up.weight.norm()

    sites, skips = look(Stack(Residual(Penalised())), example())
    assert not sites
    reason = {skip.name: skip.reason for skip in skips}["blocks.0.inner.up"]
    assert reason.startswith("weight read as a tensor: blocks.0.inner.up.weight is also read by norm (test_find_sites")


def test_a_weight_made_by_a_parametrization_is_not_converted():
    mlp = Mlp()
    nn.utils.parametrizations.weight_norm(mlp.up)
    sites, skips = look(Stack(Residual(mlp)), example())
    assert not sites and any("computed from parameters" in skip.reason for skip in skips)


def test_calls_of_different_lengths_keep_the_macs_exact():
    class TwoLengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Residual(Mlp())

        def forward(self, x):
            return torch.cat([self.block(x), self.block(x[:, :2])], 1)

    (site,), _ = look(Stack(TwoLengths()), example())
    assert (site.calls, site.tokens) == (1, 10 + 4)


def test_linears_whose_weights_are_tied_between_modules_are_one_site():
    first, second = Mlp(), Mlp()
    for name in ("up", "down"):
        getattr(second, name).weight, getattr(second, name).bias = (
            getattr(first, name).weight,
            getattr(first, name).bias,
        )
    (site,), _ = look(Stack(Residual(first), Residual(second)), example())
    assert (site.calls, site.graft.modules) == (2, ("blocks.0.inner", "blocks.1.inner"))


def test_linears_tied_to_something_else_are_not_converted():
    first, second = Mlp(), Mlp()
    second.up.weight = first.up.weight
    sites, skips = look(Stack(Residual(first), Residual(second)), example())
    assert not sites
    assert {s.reason.split(":")[0] for s in skips if s.name.startswith("blocks")} == {"weight read as a tensor"}


def test_one_projection_called_for_queries_and_for_keys_is_one_site():
    attention = models.Attention()
    attention.k = attention.q
    assert sites_of(Stack(Residual(attention)), example()) == [
        "blocks.0.inner.q qk identity 16>16 2x10 none W",
        "blocks.0.inner.v v identity 16>16 1x10 none W",
        "blocks.0.inner.o o identity 16>16 1x10 bypass W",
    ]


def test_weights_used_in_different_ways_are_not_converted():
    class TwoActivations(Mlp):
        def forward(self, x):
            return self.down(F.gelu(self.up(x))) + self.down(F.relu(self.up(x)))

    sites, skips = look(Stack(Residual(TwoActivations())), example())
    assert not sites
    assert {s.reason for s in skips if s.name.startswith("blocks")} == {
        "its weights are used in different ways: mlp gelu, mlp relu"
    }


ALL = {
    **{name: getattr(models, name) for name in PUBLISHED},
    **{name: (lambda build=build: (build(), example())) for name, (build, _) in USERS.items()},
}


@pytest.mark.parametrize("name", ALL)
def test_macs_of_sites_and_of_what_is_kept_add_up_to_the_models(name):
    model, inputs = ALL[name]()
    normalize(model.eval())
    graph = capture(model, inputs)
    sites, skips = find_sites(model, graph)
    inside = sum(
        s.calls * s.tokens * (s.d_in * s.d_out if s.last is None else s.dense_width * (len(s.first) * s.d_in + s.d_out))
        for s in sites
    )
    kept = kept_dense(build_dataflow(graph), sites, skips)
    assert inside + sum(entry.macs for entry in kept) == sum(count_macs(graph).values())
    assert {skip.name: skip.macs for skip in skips}.items() <= {entry.name: entry.macs for entry in kept}.items()


def test_sites_left_out_by_the_user_are_kept_dense_as_not_selected():
    model = Stack(Residual(Mlp())).eval()
    graph = capture(model, example())
    _, skips = find_sites(model, graph)
    reasons = {entry.name: entry.reason for entry in kept_dense(build_dataflow(graph), (), skips)}
    assert reasons["blocks.0.inner.up"] == reasons["blocks.0.inner.down"] == "not selected"


def test_looking_changes_nothing():
    model = Stack(Residual(Mlp())).eval()
    graph = capture(model, example())
    before = str(graph.graph)
    assert find_sites(model, graph) == find_sites(model, graph)
    assert str(graph.graph) == before


def test_a_model_of_eight_billion_parameters_is_matched_in_seconds():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
        graph = capture(model, torch.zeros(1, 16, dtype=torch.long))
    start = time.process_time()
    sites, _ = find_sites(model, graph)
    seconds = time.process_time() - start
    assert len(sites) == 5 * 32
    assert seconds < 2  # of the processor; about 0.3
