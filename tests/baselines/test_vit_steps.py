"""Vision transformers of three libraries a step at a time: the answers, keys and masks of the models themselves."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.baselines.choose_methods import METHODS
from acm_compiler.baselines.merged_tokens import ToMe
from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.trained.block_kinds import VitBlocks
from acm_compiler.baselines.trained.halted_tokens import HaltingTransformer
from acm_compiler.baselines.vit import sizes_of, why_not
from acm_compiler.baselines.vit_steps import steps_of
from acm_compiler.tasks.classify import Classify
from tests.helpers.small_vit import small_vit

IMAGES = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def hf_vit(kind="ViT"):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, image_size=12, patch_size=4, num_labels=5)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def timm_vit(**changes):
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 12, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    given = {**sizes, "init_values": 0.5, "qk_norm": True, "reg_tokens": 1, **changes}
    return timm.models.vision_transformer.VisionTransformer(**given)


MODELS = {
    "torchvision": small_vit,
    "vit": hf_vit,
    "deit": lambda: hf_vit("DeiT"),
    "timm": timm_vit,
}


@pytest.fixture(params=MODELS)
def vit(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    for parameter in model.parameters():  # class tokens and positions that start at nothing, too
        torch.nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


def logits_of(model, images):
    found = model(images)
    return found if isinstance(found, torch.Tensor) else found.logits


def test_all_steps_are_the_model_and_cost_what_it_costs(vit):
    steps = steps_of(vit)
    x = steps.embed(IMAGES)
    for place in range(len(steps.blocks)):
        x = steps.run_block(place, x)
    torch.testing.assert_close(steps.head(x[:, 0]), logits_of(vit, IMAGES))
    assert sizes_of(vit) == (len(steps.blocks), 16, 64, x.shape[1])
    blocks = VitBlocks(vit)
    tokens = blocks.embed({"image": IMAGES}, Classify())
    for place in range(len(steps.blocks)):
        tokens = blocks.advance(place, tokens)
    assert (tokens.spent_B + blocks.finish(tokens)[1]).tolist() == [acm.plan(vit, IMAGES[:1]).model.dense_macs] * 3


def test_a_token_that_a_bias_hides_is_seen_by_no_other_and_keys_are_those_of_the_tokens(vit):
    steps, hidden = steps_of(vit), 3
    x = steps.embed(IMAGES)
    bias = torch.zeros(len(x), 1, 1, x.shape[1])
    bias[..., hidden] = -1e4
    other = x.clone()
    other[:, hidden] += torch.randn(16)
    found, changed = (steps.run_block(0, value, bias) for value in (x, other))
    rest = [place for place in range(x.shape[1]) if place != hidden]
    torch.testing.assert_close(found[:, rest], changed[:, rest])
    assert (found[:, rest] - steps.run_block(0, x)[:, rest]).abs().max() > 1e-3
    keys, moved = (steps.attend(steps.blocks[0], value)[1] for value in (x, other))
    assert keys.shape == (*x.shape[:2], 8)  # the mean of two heads
    assert torch.equal(keys[:, rest], moved[:, rest]) and not torch.equal(keys, moved)


def test_tokens_that_halt_are_left_out_as_the_mask_says_and_merged_ones_cost_what_runs(vit):
    torch.manual_seed(1)
    halting = HaltingTransformer(vit, 2.0).eval()
    with torch.no_grad():
        masked, (logits, macs) = halting(IMAGES)[0], halting.execute(IMAGES)
    torch.testing.assert_close(logits, masked)
    torch.testing.assert_close(macs, halting.costs_B.double())
    plan, batch = acm.plan(vit, IMAGES[:1], learners=2), {"image": IMAGES, "label": torch.arange(3)}
    method = ToMe(Subject(dense=vit, plan=plan, task=Classify(), fit=lambda: [batch], held_out=lambda: [batch]))
    method.convert((0.75,), print)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        macs = method.run(batch, 0.75).macs_B
    assert macs.tolist() == [flops.get_total_flops() / 6] * 3
    assert 0.65 < float(macs[0]) / plan.model.dense_macs <= 0.75
    assert not [name for name in ("tome", "avit", "ztw") if METHODS[name].refuses(vit, plan)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"global_pool": "avg"}, "answers from a mean of its tokens"),
        ({"block_fn": "ResPostBlock"}, "does not know blocks of ResPostBlock with Attention"),
        ({"mlp_layer": "SwiGLU"}, "are not attention and an MLP of two layers"),
    ],
)
def test_models_of_timm_whose_steps_are_others_are_refused(changes, reason):
    timm = pytest.importorskip("timm")
    named = {"SwiGLU": timm.layers.SwiGLU, "ResPostBlock": timm.models.vision_transformer.ResPostBlock}
    given = {key: named.get(value, value) for key, value in changes.items()}
    assert reason in why_not(timm_vit(**given))
