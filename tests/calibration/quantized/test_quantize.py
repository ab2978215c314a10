"""`acm.quantize`: a model with int8 learners answers, is saved, copied, moved and compiled as any other."""

import copy
import json

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import CompiledModelError, DataError, SitesNotFitted, StorageError, TrainingFailed, UsageError
from tests.helpers.decoders import drawn, gated_llama
from tests.helpers.rewrite_cases import ALL, answer, rewritten
from tests.helpers.tour_model import TOKENS, WIDTH, Classifier


@pytest.fixture(scope="module")
def calibrated():
    """(calibrated model, batches), of floats."""
    torch.manual_seed(0)
    batches = [torch.randn(8, TOKENS, WIDTH) for _ in range(6)]
    model = Classifier().eval()
    floats = acm.rewrite(model, acm.plan(model, batches[0]))
    acm.calibrate(floats, batches, tokens=300, budgets=(0.5,))
    return floats, batches


@pytest.fixture
def pair(calibrated):
    """(model of floats, model of int8 learners, input)."""
    floats, batches = calibrated
    return floats, acm.quantize(copy.deepcopy(floats)), batches[0]


@torch.no_grad()
def far(model, floats, x):
    expected = floats(x)
    return float((model(x).float() - expected).norm() / expected.norm())


def test_answers_are_near_the_floats_at_every_budget(pair):
    floats, model, x = pair
    for k in (0, 1, 2, 4):
        for one in (floats, model):
            acm.set_k(one, k)
        assert 0 < far(model, floats, x) < 0.03
    acm.set_k(floats, None)
    acm.set_k(model, None)


def test_learners_are_int8_and_nothing_else_is(pair):
    floats, model, _ = pair
    small, large = (sum(t.numel() * t.element_size() for t in m.state_dict().values()) for m in (model, floats))
    assert small < 0.6 * large
    for acm_ in acm.sites(model).values():
        assert acm_.learners.w_in.dtype == torch.int8 and acm_.gate.inner.weight.dtype == torch.float32
        assert not any(p.requires_grad for p in acm_.learners.parameters())
    assert "learners: int8" in str(acm.status(model)) and "int8" not in str(acm.status(floats))
    assert acm.status(model).quantized == "int8"


def test_the_budget_table_is_kept_and_can_be_measured_anew(pair, calibrated):
    _, model, x = pair
    assert acm.set_budget(model, 0.5) == acm.set_budget(calibrated[0], 0.5)
    table = acm.recalibrate(model, calibrated[1], tokens=200, budgets=(0.5,))
    with acm.record(model) as usage, torch.no_grad():
        model(x)
    assert table.points and abs(usage.budget - 0.5) < 0.1
    acm.set_k(calibrated[0], None)


def test_it_is_saved_and_loaded(pair, tmp_path):
    _, model, x = pair
    acm.save(model, tmp_path / "out")
    loaded = acm.load(tmp_path / "out", base_model=Classifier().eval())
    assert acm.status(loaded).quantized == "int8"
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert json.loads((tmp_path / "out/model.json").read_text())["format"] == 2


def test_a_model_of_a_known_library_comes_back_by_itself(tmp_path):
    _, x, model = rewritten(ALL["hf_vit"], init="random")
    acm.save(acm.quantize(model), tmp_path / "out")
    loaded = acm.load(tmp_path / "out")
    assert torch.equal(answer(loaded, x), answer(model, x))


def test_a_folder_of_an_unknown_format_is_refused(pair, tmp_path):
    acm.save(pair[1], tmp_path / "out")
    path = tmp_path / "out/model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 5}))
    with pytest.raises(StorageError, match="format 5"):
        acm.load(tmp_path / "out")


def test_state_dicts_are_not_mixed_up(pair):
    floats, model, x = pair
    other = acm.quantize(copy.deepcopy(floats))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    for to, of in ((floats, model), (model, floats)):
        with pytest.raises(RuntimeError, match=r"int8 on one side and floats|floats on one side and int8"):
            copy.deepcopy(to).load_state_dict(of.state_dict(), strict=False)


def test_copies_and_other_types_keep_float32_scales(pair):
    _, model, x = pair
    half = copy.deepcopy(model).to(torch.bfloat16)
    for acm_ in acm.sites(half).values():
        assert acm_.learners.s_in.dtype == torch.float32 and acm_.learners.b_out.dtype == torch.bfloat16
    with torch.no_grad():
        assert half(x.bfloat16()).dtype == torch.bfloat16
    back = half.to(torch.float32)
    for old, new in zip(acm.sites(model).values(), acm.sites(back).values(), strict=True):
        assert torch.equal(old.learners.s_in, new.learners.s_in)


def test_it_is_compiled_as_one_operator(pair):
    _, model, x = pair
    table = acm.explain(model, x)
    assert table.graphs == 1
    assert all(site.implementation == "cpu" and site.reason is None for site in table.sites)
    fast = torch.compile(model, backend="acm", options={"fallback": "silent"})
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-2)
    loss = fast(x).square().mean()  # gradients may be on
    loss.backward()


def test_revert_gives_the_floats_back(pair):
    _, model, x = pair
    reverted = acm.revert(copy.deepcopy(model))
    with torch.no_grad():
        assert reverted(x).isfinite().all()


def test_what_trains_learners_is_refused(pair, calibrated):
    _, model, _ = pair
    with pytest.raises(UsageError, match="already"):
        acm.quantize(model)
    with pytest.raises(UsageError, match="before they are quantised"):
        acm.calibrate(model, calibrated[1])
    with pytest.raises(UsageError, match="before they are quantised"):
        acm.relax(model, 0.8)


def test_what_cannot_be_quantised_is_refused(calibrated):
    floats = calibrated[0]
    with pytest.raises(UsageError, match="'int8' or 'int4'"):
        acm.quantize(floats, "int2")
    with pytest.raises(CompiledModelError):
        acm.quantize(torch.compile(floats))
    relaxed = copy.deepcopy(floats)
    acm.relax(relaxed, 0.8)
    with pytest.raises(UsageError, match="relaxed"):
        acm.quantize(relaxed)
    fresh = rewritten(ALL["hf_vit"])[2]
    with pytest.raises(SitesNotFitted):
        acm.quantize(fresh)


@pytest.fixture(scope="module")
def rounded(calibrated):
    """(4-bit weights rounded by data, 4-bit weights rounded to nearest), with the rest."""
    floats, batches = calibrated
    lines = []
    model = acm.quantize(
        copy.deepcopy(floats), "int4", batches, tokens=400, rest=True, include="head", progress=lines.append
    )
    assert any("inputs of 400 tokens" in line for line in lines) and any("layers rounded" in line for line in lines)
    return model, acm.quantize(copy.deepcopy(floats), "int4", rest=True, include="head")


@pytest.mark.parametrize("k", [1, 2, 4])
def test_with_data_4_bits_lose_far_less(rounded, calibrated, k):
    floats, batches = calibrated
    for model in (floats, *rounded):
        acm.set_k(model, k)
    ours, nearest = (far(model, floats, batches[1]) for model in rounded)
    assert 0 < ours < 0.7 * nearest
    for model in (floats, *rounded):
        acm.set_k(model, None)


def test_rounding_by_data_is_the_same_every_time(rounded, calibrated):
    floats, batches = calibrated
    again = acm.quantize(copy.deepcopy(floats), "int4", iter(batches), tokens=400, rest=True, include="head")
    assert all(torch.equal(one, other) for one, other in zip(again.buffers(), rounded[0].buffers(), strict=True))


def test_rounded_weights_are_saved_and_loaded(rounded, calibrated, tmp_path):
    model, x = rounded[0], calibrated[1][0]
    acm.save(model, tmp_path / "out")
    loaded = acm.load(tmp_path / "out", base_model=Classifier().eval())
    assert acm.status(loaded).quantized == "int4" and acm.status(loaded).rest == acm.status(model).rest > 0
    for budget in (0.5, 1):
        acm.set_budget(model, budget), acm.set_budget(loaded, budget)
        with torch.no_grad():
            assert torch.equal(loaded(x), model(x))


class OddMlp(torch.nn.Module):
    """Two MLPs with a bypass, the second of rows that four learners share as three each."""

    def __init__(self):
        super().__init__()
        self.even = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        self.odd = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8))

    def forward(self, x):
        x = x + self.even(x)
        return x + self.odd(x)


@torch.no_grad()
@pytest.mark.parametrize("data", [False, True])
def test_learners_with_rows_of_odd_length_stay_floats(tmp_path, caplog, data):
    base, x = OddMlp().eval(), torch.randn(4, 6, 8)
    floats = acm.rewrite(base, acm.plan(base, x))
    model = acm.quantize(copy.deepcopy(floats), "int4", [x] * 20 if data else None, tokens=50)
    assert [site.learners.quantized for site in acm.sites(model).values()] == ["int4", None]
    assert "1 of 2 sites" in caplog.text and "odd" in caplog.text
    assert "int4, but floats at 1 of 2 sites" in str(acm.status(model))
    assert 0 < (model(x) - floats(x)).norm() < 0.2 * floats(x).norm()
    acm.save(model, tmp_path / "out")
    assert torch.equal(acm.load(tmp_path / "out", base_model=base)(x), model(x))
    alone = acm.rewrite(base, acm.plan(base, x, sites="odd"))
    with pytest.raises(UsageError, match="even length"):
        acm.quantize(alone, "int4")
    acm.quantize(alone, "int8")


def test_data_that_is_of_no_use_is_refused_and_changes_nothing(calibrated):
    floats, batches = calibrated
    model, x = copy.deepcopy(floats), batches[0]
    with torch.no_grad():
        before = model(x)
    wrong = [
        (UsageError, "only 4-bit", "int8", batches),
        (UsageError, "iterable", "int4", batches[0]),
        (DataError, "no batches", "int4", []),
        (UsageError, "raises on a batch", "int4", [x[..., :-1]]),
        (TrainingFailed, "not finite", "int4", [x, x * torch.inf]),
    ]
    for error, words, to, data in wrong:
        with pytest.raises(error, match=words):
            acm.quantize(model, to, data, rest=True)
    with pytest.raises(UsageError, match="tokens"):
        acm.quantize(model, "int4", batches, tokens=0)
    with pytest.raises(UsageError, match="mask"):
        acm.quantize(model, "int4", batches, mask=3)
    assert acm.status(model).quantized is None and not model.training
    with torch.no_grad():
        assert torch.equal(model(x), before)
    acm.quantize(model, "int4", batches, tokens=100)
    with pytest.raises(UsageError, match="already"):
        acm.quantize(model, "int4", batches)


@pytest.fixture(scope="module")
def decoder():
    """(4-bit decoder rounded by data, with its rest, batch)."""
    batch = {"input_ids": drawn(8, 20)}
    return acm.quantize(gated_llama(), "int4", [batch] * 4, tokens=400, rest=True), batch


@torch.no_grad()
def test_a_decoder_of_4_bits_is_measured_anew_and_writes(decoder):
    model, batch = decoder
    acm.recalibrate(model, [batch], tokens=100, budgets=(0.5,))
    assert acm.set_budget(model, 0.5) == pytest.approx(0.5, abs=0.1)
    prompt = batch["input_ids"][:1]
    ids = model.generate(prompt, do_sample=False, max_new_tokens=5)
    assert ids.shape == (1, 25)
    logits = model(ids).logits[0, 19:24]  # what is read at once is what was written step by step
    chosen = logits.gather(1, ids[0, 20:, None])
    assert (logits.amax(1, keepdim=True) - chosen).max() < 1e-2 * logits.std()
    drafted = acm.generate(model, prompt, draft=0.3, max_new_tokens=5, do_sample=False)
    assert drafted.shape == (1, 25)


@torch.no_grad()
def test_a_decoder_of_4_bits_is_compiled_and_exported(decoder, tmp_path):
    model, batch = decoder
    table = acm.explain(model, batch)
    assert {site.implementation for site in table.sites} == {"cpu"}
    acm.set_k(model, 2)
    fast = torch.compile(copy.deepcopy(model), backend="acm")
    expected = model(**batch).logits
    assert (fast(**batch).logits - expected).norm() < 1e-2 * expected.norm()
    acm.set_k(model, None)
    program = torch.export.load(acm.export(model, tmp_path / "out", batch, format="pt2")).module()
    acm.set_budget(model, 0.5)
    found, expected = program(**batch, use_cache=False, budget=torch.tensor(0.5)), model(**batch).logits
    assert (next(iter(found.values())) - expected).abs().max() < 2e-2 * expected.abs().max()
