"""MACs that stay dense, counted as they run: FlopCounterMode on the dense model is the oracle, at every length."""

import contextlib
import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.errors import NothingRecorded, UsageError
from acm_compiler.planning.cost import dense_macs_per_token
from acm_compiler.sources.inputs import call_model
from tests.helpers import models
from tests.helpers.build import planned_site, stack_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def torchs_macs(act, *args, **kwargs) -> float:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        act(*args, **kwargs)
    return counter.get_total_flops() / 2


def recorded(model, *calls):
    """The usage of a converted model over calls of it."""
    with torch.no_grad(), acm.record(model) as usage:
        for inputs in calls:
            call_model(model, inputs)
    return usage


def ids(tokens: int, batch: int = 2):
    return torch.randint(5, 50, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def built(config, kind):
    torch.manual_seed(0)
    return kind(config).eval()


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return built(config, transformers.LlamaForCausalLM), [{"input_ids": ids(n)} for n in (12, 5, 40, 1)]


def bert():
    model = built(transformers.BertConfig(**SIZES, num_labels=3), transformers.BertForSequenceClassification)
    return model, [{"input_ids": ids(n)} for n in (12, 4, 37)]


def t5():
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=50,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    lengths = ((12, 7), (30, 3), (4, 25))
    model = built(config, transformers.T5ForConditionalGeneration)
    return model, [{"input_ids": ids(n), "decoder_input_ids": ids(m)} for n, m in lengths]


def bart():
    halves = [
        {f"{half}_layers": 2, f"{half}_attention_heads": 4, f"{half}_ffn_dim": 64} for half in ("encoder", "decoder")
    ]
    config = transformers.BartConfig(vocab_size=50, d_model=32, decoder_start_token_id=1, **halves[0], **halves[1])
    return built(config, transformers.BartForConditionalGeneration), [{"input_ids": ids(12)}]


def wav2vec2():
    model, inputs = models.hf_wav2vec2()
    name, example = next(iter(inputs.items())) if isinstance(inputs, dict) else ("input_values", inputs)
    return model.eval(), [{name: torch.randn(2, samples)} for samples in (example.shape[1], 2500, 6000)]


def swin():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4], "num_classes": 3}
    model = torchvision.models.SwinTransformer(patch_size=[4, 4], **sizes).eval()
    return model, [torch.randn(2, 3, *size) for size in ((32, 32), (64, 48), (80, 80))]


@pytest.mark.parametrize("make", [llama, bert, t5, wav2vec2, swin])
def test_the_dense_model_costs_what_torch_counts_at_every_length(make):
    model, calls = make()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp"))
    for inputs in calls:
        usage = recorded(converted, inputs)
        assert len(usage.shares) == 2
        torch.testing.assert_close(usage.dense_macs.sum().item(), torchs_macs(call_model, model, inputs))
        assert usage.dense_macs[0] == usage.dense_macs[1]
        assert float((usage.macs - usage.kept_macs).min()) > 0


@pytest.mark.parametrize("make", [llama, t5])
def test_generating_from_a_cache_costs_what_torch_counts(make):
    model, calls = make()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp"))
    asked = {"input_ids": ids(9), "max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "pad_token_id": 0}
    with acm.record(converted) as usage:
        written = converted.generate(**asked)
    assert usage.dense_macs.sum().item() == torchs_macs(model.generate, **asked)
    assert torch.equal(written, model.generate(**asked))


def test_calls_recorded_together_cost_what_they_cost_one_by_one():
    model, calls = llama()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp"))
    text = ids(9)

    def forwards():
        cache = transformers.DynamicCache()
        read = text
        for _ in range(4):
            # the cache by place: its name differs between releases of transformers
            read = converted(read, None, None, cache, use_cache=True).logits[:, -1:].argmax(-1)
            yield

    one_by_one, steps = [], forwards()
    with torch.no_grad():
        for _ in range(4):
            with acm.record(converted) as usage:
                next(steps, None)
            one_by_one.append(usage)
        with acm.record(converted) as together:
            list(forwards())
    for total in ("macs", "dense_macs"):
        each = [getattr(usage, total) for usage in one_by_one]
        torch.testing.assert_close(getattr(together, total), torch.stack(each).sum(0))
        assert each[1][0] < each[2][0] < each[3][0] < each[0][0] / 5


@pytest.mark.parametrize("make", [llama, bert])
def test_padding_costs_nothing(make):
    model, calls = make()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp", init="random"))
    together = {"input_ids": ids(16), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    together["attention_mask"][1, 7:] = 0
    usage = recorded(converted, together)
    for row, tokens in enumerate((16, 7)):
        alone = recorded(converted, {"input_ids": together["input_ids"][row : row + 1, :tokens]})
        assert float(usage.dense_macs[row]) == pytest.approx(float(alone.dense_macs))
        assert float(usage.kept_macs[row]) == pytest.approx(float(alone.kept_macs))
    assert usage.model_share == pytest.approx(float(usage.macs.sum() / usage.dense_macs.sum()))


def test_a_padded_prompt_costs_its_own_tokens_also_while_it_goes_on():
    model, calls = llama()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp"))
    padded, mask = ids(9), torch.ones(2, 9, dtype=torch.long)
    padded[1, :4] = mask[1, :4] = 0
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with acm.record(converted) as usage:
        converted.generate(padded, attention_mask=mask, **asked)
    for row, start in enumerate((0, 4)):
        alone = torchs_macs(model.generate, padded[row : row + 1, start:], **asked)
        assert float(usage.dense_macs[row]) == pytest.approx(alone)


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("sites", ["mlp", ["mlp", "attn"]], ids=["mlp", "all"])
@pytest.mark.parametrize(("tokens", "real"), [(7, 7), (12, 12), (12, 5)])
def test_a_decoder_has_a_padding_of_its_own(make, sites, tokens, real):
    model, calls = make()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites=sites, init="random"))
    read, written = ids(12), ids(tokens)
    inputs = {"input_ids": read, "attention_mask": torch.ones(2, 12).long(), "decoder_input_ids": written}
    inputs["attention_mask"][1, 4:] = 0
    if real < tokens:
        inputs["decoder_attention_mask"] = torch.ones(2, tokens).long()
        inputs["decoder_attention_mask"][1, real:] = 0
    usage = recorded(converted, inputs)
    for row, (heard, said) in enumerate(((12, tokens), (4, real))):
        alone = {"input_ids": read[row : row + 1, :heard], "decoder_input_ids": written[row : row + 1, :said]}
        assert float(usage.dense_macs[row]) == pytest.approx(torchs_macs(call_model, model, alone))
    with torch.no_grad(), acm.record(converted, macs=False) as again:
        call_model(converted, inputs)
    for name, k_BS in again.k.items():
        reads = "encoder." in name or name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        reads = reads or name.endswith(("encoder_attn.k_proj", "encoder_attn.v_proj"))
        assert (k_BS >= 0).sum(1).tolist() == ([12, 4] if reads else [tokens, real]), name
        assert torch.equal(k_BS, usage.k[name])
    assert torch.equal(copy.deepcopy(usage).macs, usage.macs)


@pytest.mark.parametrize("make", [bert, t5, bart])
def test_masks_given_by_their_place_count_as_those_given_by_name(make):
    model, calls = make()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp", init="random"))
    inputs = {"input_ids": ids(12), "attention_mask": torch.ones(2, 12).long()}
    inputs["attention_mask"][1, 4:] = 0
    if make is not bert:
        inputs |= {"decoder_input_ids": ids(7), "decoder_attention_mask": torch.ones(2, 7).long()}
        inputs["decoder_attention_mask"][0, 5:] = 0
    named, placed = recorded(converted, inputs), recorded(converted, tuple(inputs.values()))
    assert named.masked and all(torch.equal(k_BS, placed.k[name]) for name, k_BS in named.k.items())
    assert torch.equal(named.macs, placed.macs) and torch.equal(named.dense_macs, placed.dense_macs)


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("sites", ["mlp", ["mlp", "attn"]], ids=["mlp", "all"])
def test_a_padded_prompt_of_an_encoder_costs_its_own_tokens_also_while_the_decoder_goes_on(make, sites):
    model, calls = make()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites=sites))
    padded, mask = ids(9), torch.ones(2, 9, dtype=torch.long)
    padded[1, 4:] = mask[1, 4:] = 0
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": 1}
    with acm.record(converted) as usage:
        converted.generate(padded, attention_mask=mask, **asked)
    for row, tokens in enumerate((9, 4)):
        alone = torchs_macs(model.generate, padded[row : row + 1, :tokens], **asked)
        assert float(usage.dense_macs[row]) == pytest.approx(alone)


def test_beams_leave_each_sites_k_but_no_sums_by_example():
    model, calls = t5()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp"))
    with acm.record(converted) as usage:
        converted.generate(ids(9), max_new_tokens=3, num_beams=3, do_sample=False, pad_token_id=0)
    assert {len(k_BS) for k_BS in usage.k.values()} == {2, 6}
    with pytest.raises(UsageError, match=r"encoder.*: 2, decoder.*: 6"):
        _ = usage.macs


def test_padded_clips_cost_their_own_samples_to_a_hundredth():
    model, calls = wav2vec2()
    converted = acm.rewrite(model, acm.plan(model, calls[0], sites="mlp"))
    sound, mask = torch.randn(2, 8000), torch.ones(2, 8000, dtype=torch.long)
    sound[1, 3000:] = mask[1, 3000:] = 0
    usage = recorded(converted, {"input_values": sound, "attention_mask": mask})
    for row, samples in enumerate((8000, 3000)):
        alone = torchs_macs(model, sound[row : row + 1, :samples])
        assert float(usage.dense_macs[row]) == pytest.approx(alone, rel=0.01)


def test_latents_of_which_none_is_padding_count_in_full():
    class Reader(nn.Module):
        """Tokens [B, S, 8] read by 3 latents; an ACM on the tokens and one on the latents."""

        def __init__(self, acms) -> None:
            super().__init__()
            self.on_tokens, self.on_latents = acms
            self.latents, self.proj = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8)

        def forward(self, x, attention_mask):
            x = self.on_tokens(x)
            read = (self.latents.expand(len(x), -1, -1) @ x.mT).softmax(-1) @ x
            return self.on_latents(self.proj(read))

    model = stack_of(planned_site("tokens", tokens=10), planned_site("latents", tokens=3))
    reader = Reader(model.acms).eval()
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 5:] = False
    usage = recorded(reader, {"x": torch.randn(2, 10, 8), "attention_mask": mask})
    assert (usage.k["latents"] >= 0).all() and (usage.k["tokens"][1, 5:] == -1).all()
    products, proj = 2 * 3 * 10 * 8, 3 * 8 * 8
    assert usage.kept_macs.tolist() == [products + proj, products / 2 + proj]


class Around(nn.Module):
    """Linears before and after an ACM; the second one in a checkpoint, if asked for."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner = stack_of(planned_site("a", tokens=5))
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)
        self.checkpointed = checkpointed

    def forward(self, x, stop: bool = False):
        x = self.inner(self.before(x))
        if stop:
            raise ZeroDivisionError
        if self.checkpointed:
            return torch.utils.checkpoint.checkpoint(self.after, x, use_reentrant=False)
        return self.after(x)


def test_neither_an_acms_own_products_nor_the_users_count():
    model, x = Around().eval(), torch.randn(3, 5, 8)
    with acm.record(model) as usage:
        y = model(x)
        _ = y @ y.mT
    assert usage.kept_macs.tolist() == [5 * (64 + 32)] * 3
    site = planned_site("a")
    assert usage.dense_macs.tolist() == [5 * (64 + 32 + dense_macs_per_token(site))] * 3


def test_a_part_called_by_itself_counts():
    model, x = Around().eval(), torch.randn(3, 5, 8)
    with acm.record(model) as usage:
        model.after(model.inner(x))
    assert usage.kept_macs.tolist() == [5 * 32] * 3


def test_what_a_checkpoint_computes_again_counts_once():
    model, x = Around(checkpointed=True), torch.randn(3, 5, 8)
    with acm.record(model) as usage:
        model(x).sum().backward()
    assert usage.kept_macs.tolist() == [5 * (64 + 32)] * 3


class Compiled(Around):
    """`Around`, whose second linear is a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(torch.nn.functional.linear, backend="eager", fullgraph=True)

    def forward(self, x):
        return self.part(self.inner(self.before(x)), self.after.weight)


def test_a_function_that_the_user_compiled_counts_and_stays_compiled():
    model, x = Compiled().eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = model(x)
        with acm.record(model) as usage:
            assert torch.equal(model(x), expected)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(model(x), expected)
    assert usage.kept_macs.tolist() == [5 * (64 + 32)] * 3


def test_a_function_first_compiled_while_recording_counts(monkeypatch):
    model, x = Compiled().eval(), torch.randn(3, 5, 8)
    with torch.no_grad(), contextlib.ExitStack() as recording:
        with monkeypatch.context() as nothing_compiled:
            nothing_compiled.delitem(sys.modules, "torch._dynamo")
            usage = recording.enter_context(acm.record(model))
        model(x)
    assert usage.kept_macs.tolist() == [5 * (64 + 32)] * 3
    assert compiles()


def test_nothing_stays_on_a_model_that_raised():
    model, x = Around().eval(), torch.randn(3, 5, 8)
    with contextlib.suppress(ZeroDivisionError), acm.record(model):
        model(x, stop=True)
    with acm.record(model) as usage:
        with contextlib.suppress(ZeroDivisionError):
            model(x, stop=True)
        assert _get_current_function_mode() is None
        model(x)
    assert _get_current_function_mode() is None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert usage.kept_macs.tolist() == [5 * (64 + 64 + 32)] * 3


class Halted(Around):
    """`Around`, in whose forward someone presses Ctrl-C."""

    def forward(self, x):
        super().forward(x)
        raise KeyboardInterrupt


def compiles() -> bool:
    """True if torch.compile is on and hands a function to its backend."""
    seen = []
    torch.compile(lambda x: x + 1, backend=lambda graph, _: seen.append(graph) or graph.forward)(torch.ones(2))
    return bool(seen)


def test_ctrl_c_in_a_forward_leaves_nothing_behind():
    model, x = Halted().eval(), torch.randn(3, 5, 8)
    with pytest.raises(KeyboardInterrupt), acm.record(model) as usage:
        model(x)
    assert _get_current_function_mode() is None
    assert compiles()
    assert usage.kept_macs.tolist() == [5 * (64 + 32)] * 3


def test_compiling_goes_on_after_two_threads_recorded_at_the_same_time():
    class Meeting(Around):
        def __init__(self, meet) -> None:
            super().__init__()
            self.meet = meet

        def forward(self, x):
            self.meet()
            return super().forward(x)

    def recorded_kept(meet) -> list[float]:
        model = Meeting(meet).eval()
        with torch.no_grad(), acm.record(model) as usage:
            model(torch.randn(3, 5, 8))
        return usage.kept_macs.tolist()

    inside, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        second = []

        def start_the_second() -> None:
            second.append(pool.submit(recorded_kept, lambda: inside.set() or go_on.wait(60)))
            assert inside.wait(60)

        kept = recorded_kept(start_the_second)
        still_off = not compiles()
        go_on.set()
        assert kept == second[0].result() == [5 * (64 + 32)] * 3
    assert still_off and compiles()


def test_a_model_that_a_compiled_function_calls_is_recorded_as_eager_code():
    model, x = Around().eval(), torch.randn(3, 5, 8)
    step = torch.compile(lambda x: model(x), backend="eager")
    with torch.no_grad():
        expected = step(x)
        with acm.record(model) as usage:
            assert torch.equal(step(x), expected)
        assert torch.equal(step(x), expected)
    assert usage.k["a"].shape == (3, 5) and usage.kept_macs.tolist() == [5 * (64 + 32)] * 3


def test_sites_that_see_batches_of_different_sizes_are_refused():
    class Towers(nn.Module):
        """Texts [B, S, 8] and images [B, P, 8], each with an ACM of its own."""

        def __init__(self, acms) -> None:
            super().__init__()
            self.texts, self.images = acms

        def forward(self, texts, images):
            return self.texts(texts).mean(1) @ self.images(images).mean(1).T

    model = Towers(stack_of(planned_site("texts"), planned_site("images")).acms).eval()
    for images in (3, 5, 1):
        with torch.no_grad(), acm.record(model) as usage:
            model(torch.randn(3, 5, 8), torch.randn(images, 4, 8))
        assert usage.k["images"].shape == (images, 4)
        for asked in (
            lambda usage=usage: usage.macs,
            lambda usage=usage: usage.dense_macs,
            lambda usage=usage: usage.shares,
        ):
            if images == 3:
                assert len(asked()) == 3
                continue
            with pytest.raises(UsageError, match=f"texts: 3, images: {images}"):
                asked()


def test_a_record_without_macs_says_so_when_asked_for_them():
    model, x = Around().eval(), torch.randn(3, 5, 8)
    with acm.record(model, macs=False) as usage:
        model(x)
    assert str(usage).splitlines()[0] == f"budget {usage.budget:.3f} reached over 3 examples"
    for name in ("macs", "dense_macs", "model_share", "kept_macs"):
        with pytest.raises(NothingRecorded, match="macs=False"):
            getattr(usage, name)
