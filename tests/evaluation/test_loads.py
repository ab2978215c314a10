"""Loads along sequences: what a record says by place, clips over time, texts by token, and the page about them."""

import dataclasses
import re

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.errors import NothingRecorded
from acm_compiler.evaluation.evaluate import evaluate
from acm_compiler.evaluation.loads import Clip, ClipLoads, Loads, Text, find_clip_loads, find_text_loads
from acm_compiler.evaluation.places import frame_foreground
from acm_compiler.evaluation.wording import budget_names, evaluation_table
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion
from acm_compiler.reporting.charts import clip_chart, envelope, stretches
from acm_compiler.reporting.contents import Report
from acm_compiler.reporting.figures import LIGHT, as_svg, drawing
from acm_compiler.reporting.write import write_report
from acm_compiler.tasks import Task

OPEN = 0.5
FRAME = 4


class Listener(nn.Module):
    """Frames of four samples; two MLPs; logits [B, S, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FRAME, 16), nn.ReLU(), nn.Linear(16, FRAME)) for _ in "ab")
        self.head = nn.Linear(FRAME, 3)

    def forward(self, input_values):
        x = input_values.unflatten(1, (-1, FRAME))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Reader(nn.Module):
    """The same of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, FRAME)
        self.listener = Listener()

    def forward(self, input_ids):
        return self.listener(self.embed(input_ids).flatten(1))


class FrameTask(Task):
    """Scores nothing much; knows how frames are masked."""

    metric = "perplexity"

    def inputs(self, batch):
        return {name: batch[name] for name in ("input_values", "input_ids") if name in batch}

    def mask(self, batch):
        if "input_ids" in batch:
            return batch["attention_mask"].bool()
        return batch["attention_mask"][:, ::FRAME].bool()

    def score(self, output, batch):
        return output.mean((1, 2)).float()


def converted(model, inputs):
    """Its gates run all four learners where the sum of a frame is above zero, else one."""
    made = acm.rewrite(model, acm.plan(model, inputs, sites="mlp", init="random"))
    with torch.no_grad():
        for site in acm.sites(made).values():
            for parameter in (*site.gate.parameters(), *site.learners.parameters()):
                parameter.zero_()
            site.gate.inner.weight.fill_(10.0)
            site.gate.outer.bias[1 - site.k_min] = 5.0
            site.gate.outer.weight[-1].fill_(10.0)
    points = (BudgetPoint(share=OPEN, knob=0.0, k_lo=0), BudgetPoint(share=1.0, knob=-99.0, k_lo=0))
    conversion(made).table = BudgetTable(rule="logits", points=points, examples=1)
    return made


@pytest.fixture
def clips():
    """Three clips: loud in the middle; the last is half as long as the others."""
    sound = torch.full((3, 80), -0.1)
    sound[:, 20:40] = 1.0
    mask = torch.ones(3, 80, dtype=torch.long)
    mask[2, 40:] = 0
    return {"input_values": sound, "attention_mask": mask, "foreground": (sound > 0) & mask.bool()}


@pytest.fixture
def listener():
    return converted(Listener(), {"input_values": torch.zeros(1, 80)})


def test_a_record_gives_the_load_at_each_place(listener, clips):
    acm.set_budget(listener, OPEN)
    with acm.batch(listener, mask=FrameTask().mask(clips)), acm.record(listener) as usage:
        listener(clips["input_values"])
    load = usage.load()
    expected = torch.full((20,), 0.25)
    expected[5:10] = 1.0
    assert torch.equal(load[0], expected) and torch.equal(load[2, :10], expected[:10]) and load[2, 10:].isnan().all()
    with pytest.raises(NothingRecorded, match=r"found \[20\], expected 7"):
        usage.load(tokens=7)


def test_load_over_time_leaves_padding_out(listener, clips):
    found = find_clip_loads(listener, clips, FrameTask(), [OPEN], rate=40)
    assert [len(clip.samples) for clip in found.clips] == [80, 80, 40]
    assert [len(clip.loads[OPEN]) for clip in found.clips] == [20, 20, 10]
    assert int(found.clips[0].foreground.sum()) == 20 and found.rate == 40
    assert find_clip_loads(listener, {"image": torch.zeros(1)}, FrameTask(), [OPEN]) is None


def test_speech_against_silence_counts_real_frames_only(listener, clips):
    found = evaluate(listener, [clips], FrameTask(), budgets=[OPEN])
    use = found.budgets[0].foreground
    assert (use.on, use.off, use.ratio, use.examples, use.of) == (4.0, 1.0, 4.0, 3, "frames")
    many = {name: value.repeat(200, 1) for name, value in clips.items()}
    shuffled = evaluate(listener, [many], FrameTask(), budgets=[OPEN]).budgets[0].foreground.shuffled
    assert shuffled == pytest.approx(1, abs=0.03)
    assert "k shuffled over frames" in evaluation_table(found)


def test_a_frame_is_foreground_where_half_of_it_is():
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, 3:6] = mask[0, 10:] = True
    assert frame_foreground(mask, 3)[0].tolist() == [False, True, True]


@pytest.mark.parametrize("rate", [40, None])
def test_the_page_shows_clips_and_whether_speech_costs_more(tmp_path, listener, clips, rate):
    found = evaluate(listener, [clips], FrameTask(), budgets=[OPEN])
    loads = find_clip_loads(listener, clips, FrameTask(), [OPEN], rate=rate)
    page = write_report(
        tmp_path, Report(title="x", evaluation=found, plan=conversion(listener).plan, loads=Loads(clips=loads))
    ).read_text()
    for words in ("load over time of 3 clips", "Speech against silence", "k on speech", "speech ratio at 0.50"):
        assert words in page, words
    svg = (tmp_path / "load_over_time.svg").read_text()
    assert ("seconds" if rate else "samples") in svg and "budget 0.50" in svg and "speech" in svg


def test_the_page_shades_tokens_and_escapes_them(tmp_path):
    model = converted(Reader(), {"input_ids": torch.ones(1, 6, dtype=torch.long)})
    with torch.no_grad():
        model.embed.weight.fill_(-0.1)
        model.embed.weight[3] = 1.0
    ids = torch.tensor([[1, 3, 2, 2, 3, 1], [3, 1, 2, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 6, [1] * 3 + [0] * 3])}
    found = find_text_loads(model, batch, FrameTask(), [OPEN], pieces=lambda ids: [f"<{i}>" for i in ids])
    assert [text.pieces for text in found] == [("<1>", "<3>", "<2>", "<2>", "<3>", "<1>"), ("<3>", "<1>", "<2>")]
    assert found[1].loads[OPEN].tolist() == [1.0, 0.25, 0.25]
    plain = find_text_loads(model, batch, FrameTask(), [OPEN], pieces=None)
    assert plain[1].pieces == ("3", "1", "2")
    evaluation = evaluate(model, [batch], FrameTask(), budgets=[OPEN])
    report = Report(title="x", evaluation=evaluation, plan=conversion(model).plan, loads=Loads(texts=found))
    page = write_report(tmp_path, report).read_text()
    assert "Each token is shaded" in page and "&lt;3&gt;" in page and "<3>" not in page
    shades = [re.search(rf'style="background:(#\w+);color:(#\w+)" title="{share}"', page) for share in ("1.00", "0.25")]
    assert shades[0].group(1) != shades[1].group(1) and (shades[0].group(2), shades[1].group(2)) == ("#000", "#fff")
    assert 'class="load"' in page and 'class="load words"' not in page


def test_parts_of_a_word_stand_together_where_words_are_told(tmp_path):
    text = Text(pieces=("<s>", "A", " wo", "rd", "\n"), loads={0.5: torch.linspace(0, 1, 5)})
    model = converted(Reader(), {"input_ids": torch.ones(1, 6, dtype=torch.long)})
    batch = {"input_ids": torch.ones(1, 6, dtype=torch.long), "attention_mask": torch.ones(1, 6)}
    found = evaluate(model, [batch], FrameTask(), budgets=[OPEN])
    loads = Loads(texts=(text,))
    report = Report(title="x", evaluation=found, plan=conversion(model).plan, loads=loads)
    section = write_report(tmp_path, report).read_text()
    assert section.count('class="load words"') == 1
    assert re.findall(r'( ?)<span style="[^"]*" title="0.\d\d">([^<]*)<', section) == [
        ("", "&lt;s&gt;"),
        ("", "A"),
        (" ", "wo"),
        ("", "rd"),
    ]
    assert ">·<" in section


def test_an_envelope_holds_the_extremes_of_a_long_waveform():
    samples = torch.zeros(100_000)
    samples[777], samples[-1] = 2.0, -1.0
    places, low, high = envelope(samples)
    assert len(places) <= 1200 and high.max() == 1.0 and low.min() == -0.5
    assert [len(part) for part in envelope(torch.zeros(5))] == [5, 5, 5]


def test_speech_is_shaded_by_its_stretches():
    said = torch.zeros(30_000, dtype=torch.bool)
    said[3000:6000] = said[-15_000:] = True
    said[10_000:10_002] = True  # too short to be seen
    assert stretches(said) == [pytest.approx((0.1, 0.2)), pytest.approx((0.5, 1.0))]
    assert stretches(torch.zeros(7)) == [] and stretches(torch.ones(3)) == [(0.0, 1.0)]


@pytest.mark.parametrize("seconds", [3, 60])
def test_the_chart_of_long_clips_is_a_small_file(seconds):
    torch.manual_seed(0)
    samples, loads = torch.randn(seconds * 16_000), {budget: torch.rand(50 * seconds) for budget in (0.25, 0.4, 0.75)}
    clip = Clip(samples=samples, foreground=samples.abs() > 0.5, loads=loads)
    with drawing():
        svg = as_svg(clip_chart(ClipLoads(clips=(clip,), rate=16_000), LIGHT, budget_names(loads)))
    assert 10_000 < len(svg) < 120_000


def test_repeated_calls_are_averaged(listener, clips):
    twice = dataclasses.replace(
        conversion(listener).plan,
        sites=tuple(dataclasses.replace(site, calls=2) for site in conversion(listener).plan.sites),
    )
    conversion(listener).plan = twice
    acm.set_k(listener, 2)
    with acm.record(listener) as usage:
        listener(clips["input_values"])
        listener(clips["input_values"])
    assert torch.equal(usage.load(), torch.full((3, 20), 0.5))
