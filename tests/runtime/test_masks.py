"""Padding masks of a call: by name, by place, in torch's way."""

import copy
import re

import pytest
import torch
from torch import nn

import acm_compiler as acm
import acm_compiler.runtime.measure_budgets as measure
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options, masked
from acm_compiler.calibration.recalibrate import recalibrate
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runtime.masks import call_mask
from acm_compiler.sources.inputs import by_name
from tests.helpers.calibration_tiny import make_tiny, texts
from tests.helpers.rewrite_cases import ALL, give_budgets, rewritten

QUICK = Options(tokens=200, gate_steps=2, sample=1000)
DATA = texts(12, batch=8)
PLACED = [(b["x"], b["attention_mask"]) for b in DATA]


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Tables of few rows: every row costs many forwards."""
    monkeypatch.setattr(measure, "GRID", (0.4, 0.7))


class Takes(nn.Module):
    def forward(self, x, mask=None, *more, scale=1.0, **others): ...


class Anything(nn.Module):
    def forward(self, *args, **kwargs): ...


def test_arguments_get_the_names_of_the_forward():
    x, mask = object(), object()
    assert by_name(Takes(), (x, mask), {"scale": 2, "other": 3}) == ((), {"x": x, "mask": mask, "scale": 2, "other": 3})
    assert by_name(Takes(), (x, mask, 1, 2), {}) == ((1, 2), {"x": x, "mask": mask})
    assert by_name(Anything(), (x, mask), {"a": 1}) == ((x, mask), {"a": 1})
    for wrong in ((), {"x": x}), ((x,), {"x": x}):
        assert by_name(Takes(), *wrong) == wrong
    assert by_name(nn.Linear(2, 2), (x, mask), {}) == ((x, mask), {})


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_mask_given_by_its_place_calibrates_as_one_given_by_its_name():
    named, placed = make_tiny(), make_tiny()
    calibrate_on(named, masked(DATA), options=QUICK)
    calibrate_on(placed, masked(PLACED), options=QUICK)
    same(named.state_dict(), placed.state_dict())
    assert conversion(named).table == conversion(placed).table
    assert recalibrate(named, DATA, tokens=100).points == recalibrate(placed, PLACED, tokens=100).points


def test_a_mask_given_by_its_place_counts_in_a_record():
    model, (inputs,) = make_tiny(), texts(1)
    model.eval()
    with torch.no_grad(), acm.record(model) as named:
        model(**inputs)
    with torch.no_grad(), acm.record(model) as placed:
        model(inputs["x"], inputs["attention_mask"])
    assert placed.masked and (named.k["blocks.0.mlp"] == -1).any()
    same(named.k, placed.k)
    assert torch.equal(named.macs, placed.macs) and torch.equal(named.dense_macs, placed.dense_macs)


class Reads(nn.Module):
    def forward(self, src, tgt=None, src_key_padding_mask=None, key_padding_mask=None, attention_mask=None): ...


PADDED = torch.tensor([[False, False, True], [False, True, True]])


@pytest.mark.parametrize("name", ["src_key_padding_mask", "key_padding_mask"])
@pytest.mark.parametrize("mask", [PADDED, torch.zeros(2, 3).masked_fill(PADDED, -torch.inf)], ids=["bool", "float"])
def test_torchs_padding_masks_are_true_or_infinite_at_padding(name, mask):
    for src in (torch.ones(2, 3, 4), torch.ones(3, 2, 4)):
        found = call_mask(Reads(), (), {"src": src, name: mask})
        assert torch.equal(found.real_BR, ~PADDED)
        assert torch.equal(found.tokens(), ~PADDED) and torch.equal(found.new_tokens(), ~PADDED)


def test_a_padding_mask_whose_tokens_are_in_doubt_is_passed_over():
    src, ones = torch.ones(2, 3, 4), torch.ones(2, 3)
    assert call_mask(Reads(), (src,), {"key_padding_mask": PADDED.long()}) is None
    assert call_mask(Reads(), (src,), {"key_padding_mask": PADDED[0]}) is None
    assert call_mask(Reads(), (src, torch.ones(2, 3, 4), PADDED), {}) is None
    assert call_mask(Reads(), (src, torch.ones(2, 5, 4), PADDED), {}).real_BR.equal(~PADDED)
    both = call_mask(Reads(), (src,), {"key_padding_mask": PADDED, "attention_mask": ones})
    assert both.real_BR.all()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 1).eval()


def paddings(batches: int = 12) -> list[dict[str, torch.Tensor]]:
    """Inputs of an encoder of torch: 8 examples of up to 6 tokens, rubbish where the mask is True."""
    lengths = torch.randint(2, 7, (batches, 8, 1), generator=torch.Generator().manual_seed(1))
    x = torch.randn(batches, 8, 6, 8, generator=torch.Generator().manual_seed(2))
    padding = torch.arange(6) >= lengths
    x[padding] = 50.0
    return [{"src": x, "src_key_padding_mask": mask} for x, mask in zip(x, padding, strict=True)]


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_padding_of_torchs_encoder_counts_nowhere():
    model, batches = encoder(), paddings()
    converted = acm.rewrite(model, acm.plan(model, batches[0]))
    twin, lines = copy.deepcopy(converted), []
    fitted = [b for place, b in enumerate(batches, start=1) if place % 6]
    real = sum(int((~b["src_key_padding_mask"]).sum()) for b in fitted)
    acm.calibrate(converted, batches, tokens=5000, progress=lines.append)
    assert any(f"token {real:,} of 5,000" in line for line in lines), lines
    acm.calibrate(twin, [(b["src"], None, b["src_key_padding_mask"]) for b in batches], tokens=5000)
    same(converted.state_dict(), twin.state_dict())
    inputs = batches[0]
    for around in (torch.no_grad, torch.enable_grad):
        with around(), acm.record(converted) as usage:
            converted(**inputs)
        assert all(torch.equal(k_BS == -1, inputs["src_key_padding_mask"]) for k_BS in usage.k.values())
        for row, mask in enumerate(inputs["src_key_padding_mask"]):
            with around(), acm.record(converted) as alone:
                converted(inputs["src"][row : row + 1, ~mask])
            assert float(usage.kept_macs[row]) == pytest.approx(float(alone.kept_macs))
            assert float(usage.dense_macs[row]) == pytest.approx(float(alone.dense_macs))


def test_what_mask_says_of_a_batch_counts_as_the_calls_own_word():
    own, said, silent = make_tiny(), make_tiny(), make_tiny()
    acm.calibrate(own, DATA, tokens=200)
    acm.calibrate(said, PLACED, tokens=200, mask=lambda batch: batch[1].bool())
    acm.calibrate(silent, DATA, tokens=200, mask=lambda batch: None)
    same(own.state_dict(), said.state_dict())
    same(own.state_dict(), silent.state_dict())
    assert conversion(own).table == conversion(said).table == conversion(silent).table


def test_what_mask_says_of_a_batch_overrules_the_call():
    first, lines = torch.arange(6).expand(8, 6) < 2, []
    calibrated = make_tiny()
    acm.calibrate(calibrated, DATA, tokens=400, mask=lambda batch: first, progress=lines.append)
    assert any(f"token {first.sum() * 10} of 400" in line for line in lines), lines
    table = acm.recalibrate(calibrated, DATA, tokens=40, mask=lambda batch: first)
    assert table.examples == 8 * 3, "16 tokens of a batch are real"
    acm.set_budget(calibrated, 0.7)
    shares = []
    for inputs in DATA[:3]:
        with torch.no_grad(), acm.batch(calibrated, mask=first), acm.record(calibrated) as usage:
            calibrated(**inputs)
        shares.append(usage.shares)
    assert float(torch.cat(shares).mean()) == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (lambda batch: batch["attention_mask"], r"int64 \[8, 6\].*bool \[batch, tokens\].*\.bool"),
        (lambda batch: torch.ones(8, dtype=torch.bool), r"bool \[8\].*bool \[batch, tokens\]"),
        (lambda batch: [[True]], r"found list.*or None"),
        (torch.ones(8, 6, dtype=torch.bool), r"found Tensor.*function of one batch"),
        (lambda batch: torch.ones(8, 5, dtype=torch.bool), r"blocks.*number of tokens.*found 5, expected 6"),
        (lambda batch: torch.ones(7, 6, dtype=torch.bool), r"blocks.*number of examples.*found 7, expected 8"),
    ],
)
@pytest.mark.parametrize("verb", [acm.calibrate, acm.recalibrate])
def test_a_mask_of_another_kind_is_refused_in_words(calibrated, verb, mask, match):
    before = {name: tensor.clone() for name, tensor in calibrated.state_dict().items()}
    with pytest.raises(acm.AcmError) as refusal:
        verb(calibrated, DATA, mask=mask)
    assert re.search(match, str(refusal.value).replace("\n", " ")), refusal.value
    same(before, calibrated.state_dict())


@pytest.fixture(scope="module")
def calibrated():
    model = make_tiny()
    calibrate_on(model, masked(DATA), options=QUICK)
    return model


def pooled(output, mask):
    """The mean over the real tokens, which is no padding's."""
    assert mask.dtype == torch.bool
    return (output * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def test_calibrate_judges_by_the_answer_that_it_is_given():
    public, inner, other = make_tiny(), make_tiny(), make_tiny()
    acm.calibrate(public, DATA, tokens=200, answer=pooled)
    calibrate_on(inner, masked(DATA), options=Options(tokens=200, answer=pooled))
    acm.calibrate(other, DATA, tokens=200)
    same(public.state_dict(), inner.state_dict())
    weight = "blocks.0.mlp.learners.w_in"
    assert not torch.equal(public.state_dict()[weight], other.state_dict()[weight])


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ("logits", r"found str.*answer\(output, mask\)"),
        (lambda output, mask: None, r"found NoneType.*floating tensor \[batch"),
        (lambda output, mask: [output, 3], r"float32 \[8, 6, 12\], int.*list of such"),
        (lambda output, mask: output.argmax(-1), r"int64 \[8, 6\]"),
        (lambda output, mask: output.sum(), r"float32 \[\]"),
    ],
)
def test_an_answer_of_another_kind_is_refused_in_words(answer, match):
    with pytest.raises(UsageError) as refusal:
        acm.calibrate(make_tiny(), DATA, answer=answer)
    assert re.search(match, str(refusal.value).replace("\n", " ")), refusal.value


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("int8", [False, True])
def test_padding_that_is_skipped_runs_no_learner_and_changes_nothing_else(compiled, int8):
    model, ids = rewritten(ALL["hf_bert"], init="random")[2].eval(), torch.randint(1, 50, (3, 7))
    give_budgets(model)
    acm.set_budget(model, 0.6)
    if int8:
        acm.quantize(model)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = mask[2, 1:] = False
    run = torch.compile(model, backend="acm") if compiled else model
    kept = {}
    for site in acm.sites(model).values():
        site.register_forward_hook(lambda site, _, y: kept.setdefault(site.name, []).append(y))

    def logits(**options):
        with torch.no_grad(), acm.batch(model, mask=mask, **options):
            return run(input_ids=ids, attention_mask=mask.long()).logits

    torch.testing.assert_close(logits(skip_padding=True), logits())
    if not compiled:
        for name, (skipped, whole) in kept.items():
            assert torch.equal(skipped[0], whole[0]), name
            nothing = acm.sites(model)[name].learners.weights().b_out[0]
            torch.testing.assert_close(skipped[~mask], nothing.expand_as(skipped[~mask]))


def test_skipping_padding_needs_a_mask():
    model = rewritten(ALL["hf_bert"], init="random")[2]
    with pytest.raises(UsageError, match="needs a mask"), acm.batch(model, skip_padding=True):
        pass


def heard_by(name):
    """A small model of sound with the sizes of masks it makes of 64 features, or 4,000 samples, and half as many."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "Parakeet":
        encoder = sizes | {"num_mel_bins": 16, "num_key_value_heads": 2, "subsampling_conv_channels": 8}
        config = transformers.ParakeetCTCConfig(vocab_size=30, encoder_config=encoder)
        return transformers.ParakeetForCTC(config).eval(), torch.randn(2, 64, 16), [8, 4]
    if name == "wav2vec 2.0 BERT":
        config = transformers.Wav2Vec2BertConfig(
            **sizes, vocab_size=30, feature_projection_input_dim=16, add_adapter=True, output_hidden_size=32
        )
        return transformers.Wav2Vec2BertForCTC(config).eval(), torch.randn(2, 64, 16), [64, 32]
    layers = {f"{half}_num_hidden_layers": 1 for half in ("encoder", "decoder")}
    config = transformers.MoonshineConfig(hidden_size=32, intermediate_size=64, vocab_size=30, **layers)
    return transformers.MoonshineForConditionalGeneration(config).eval(), torch.randn(2, 4000), [9, 3]


@pytest.mark.parametrize("name", ["Parakeet", pytest.param("wav2vec 2.0 BERT", marks=pytest.mark.slow), "Moonshine"])
def test_padding_of_features_and_samples_is_followed_into_frames(name):
    model, heard, frames = heard_by(name)
    mask = torch.ones(heard.shape[:2], dtype=torch.long)
    mask[1, heard.shape[1] // 2 :] = 0
    inputs = {model.main_input_name: heard, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.ones(2, 5, dtype=torch.long)
    converted = acm.rewrite(model, acm.plan(model, inputs, sites="mlp"))
    with torch.no_grad(), acm.record(converted) as usage:
        converted(**inputs)
    assert (usage.k[next(iter(usage.k))] >= 0).sum(1).tolist() == frames
