"""Encoders of texts a block at a time: the model's own answers and MACs, padding, and examples that leave."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.baselines.choose_methods import METHODS
from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.trained.block_kinds import TextBlocks, blockwise
from acm_compiler.baselines.trained.early_exit import Exits
from acm_compiler.tasks.classify import Classify

_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_NAMED = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3}
MODELS = {
    "Bert": {},
    "DistilBert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "ModernBert": {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "Electra": {"embedding_size": 16},  # a projection before the blocks, not counted twice
    "Llama": {"num_key_value_heads": 2},  # which would keep keys
}


@pytest.fixture(params=MODELS)
def encoder(request):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    given = MODELS[request.param]
    sizes = {} if "dim" in given else _SIZES
    config = getattr(transformers, f"{request.param}Config")(**sizes, **_NAMED, **given)
    return getattr(transformers, f"{request.param}ForSequenceClassification")(config).eval().requires_grad_(False)


def texts(lengths):
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    words = torch.randint(3, 60, mask.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": words * mask, "attention_mask": mask, "label": torch.zeros(len(lengths)).long()}


def run(steps, tokens):
    spent = [tokens.spent_B]
    for place in range(len(steps.blocks)):
        tokens = steps.advance(place, tokens)
        spent.append(tokens.spent_B)
    each = torch.stack(spent).diff(dim=0)
    assert (each > 0).all() and torch.equal(each, each[:1].expand_as(each))
    logits, macs = steps.finish(tokens)
    return logits, tokens.spent_B + macs


def test_all_blocks_are_the_model_and_cost_what_it_costs(encoder):
    task, steps = Classify(), TextBlocks(encoder)
    batch = texts([9, 5, 7, 9])
    tokens = steps.embed(batch, task)
    assert tokens.before_B.tolist() == [length * 16 * 32 * ("Electra" in str(type(encoder))) for length in (9, 5, 7, 9)]
    logits, macs = run(steps, tokens)
    wanted = encoder(**task.inputs(batch)).logits
    torch.testing.assert_close(logits, wanted)
    keep = torch.tensor([True, False, True, False])
    fewer, cost = run(steps, tokens.only(keep))
    torch.testing.assert_close(fewer, wanted[keep])
    assert torch.equal(cost, macs[keep])
    whole = texts([9, 9])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        encoder(**task.inputs(whole))
    assert run(steps, steps.embed(whole, task))[1].tolist() == [flops.get_total_flops() / 4] * 2
    assert macs[0] == macs[3] > macs[2] > macs[1]
    read = steps.read(tokens)
    torch.testing.assert_close(read[1, 32:], tokens.x_BSD[1, :5].mean(0))


def test_texts_leave_where_an_exit_is_sure_and_keep_its_answer(encoder):
    torch.manual_seed(1)
    batch = texts([9, 5, 7, 9, 4, 8])
    plan = acm.plan(encoder, {key: batch[key][:1] for key in ("input_ids", "attention_mask")}, sites="mlp", learners=2)
    subject = Subject(dense=encoder, plan=plan, task=Classify(), fit=lambda: [batch], held_out=lambda: [batch])
    method = METHODS["ztw"](subject)
    method.exits = Exits(3, 64, 3).requires_grad_(False)
    after = method._after(batch)
    logits = method._logits(after, method.steps.answer(after[-1]))
    exits = [method.exits.together(place, logits[: place + 1]) for place in range(3)]
    sure = exits[0].softmax(-1).amax(-1)
    method.thresholds[0.5] = float(sure.sort().values[3])
    given = []
    method.score = lambda output, batch: given.append(output) or torch.zeros(6)
    macs, costs = method.run(batch, 0.5).macs_B, method._exits(batch)[1]
    early = sure >= method.thresholds[0.5]
    assert 3 <= early.sum() < 6
    torch.testing.assert_close(given[0][early], exits[0][early])
    assert torch.equal(macs[early], costs[early, 0])
    assert METHODS["ztw"].refuses(encoder, plan) is None and METHODS["ztw"].floor(encoder, plan) == 1 / 3


@pytest.mark.parametrize("name", ["T5", "XLNet", "SqueezeBert", "Albert"])
def test_models_of_several_stacks_one_shared_block_or_another_order_of_axes_are_refused(name):
    transformers = pytest.importorskip("transformers")
    given = {"T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}, "XLNet": {"d_model": 32, "n_layer": 2}}
    sizes = given.get(name, {**_SIZES, "embedding_size": 32})
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(vocab_size=60, **sizes)
        assert blockwise(getattr(transformers, f"{name}ForSequenceClassification")(config)) is None
