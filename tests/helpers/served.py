"""Small saved models as a server opens them, and the app over them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.runs.given import Given
from acm_compiler.serving.batcher import Batcher, Limits
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.open_served import ModelOptions, open_served
from acm_compiler.serving.pace import Line, Pace
from acm_compiler.serving.served import Served
from tests.helpers.rewrite_cases import ALL, give_budgets, rewritten, trained

WORDS = ("[PAD]", "[UNK]", "a", "small", "text", "about", "nothing", "else")


def save_images(folder: Path) -> None:
    """Save a classifier of images [3, 16, 16]."""
    model = rewritten(ALL["hf_vit"], init="random")[2]
    give_budgets(model)
    acm.save(model, folder)


def save_texts(folder: Path) -> None:
    """Save an encoder of texts, with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel

    def bert() -> tuple[nn.Module, torch.Tensor]:
        small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
        config = BertConfig(vocab_size=50, max_position_embeddings=12, **small)
        return BertModel(config), torch.randint(0, 50, (2, 7))

    model, x = trained(bert)
    converted = acm.rewrite(model, acm.plan(model, x, init="random"))
    give_budgets(converted)
    acm.save(converted, folder)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def save_audio(folder: Path) -> None:
    """Save a classifier of clips at three classes, of one convolution over time and two blocks."""
    from transformers import Wav2Vec2ForSequenceClassification

    original, x = ALL["hf_wav2vec2"]()
    config = copy.deepcopy(original.config)
    config.num_labels, config.classifier_proj_size = 3, 8
    model = Wav2Vec2ForSequenceClassification(config).eval()
    converted = acm.rewrite(model, acm.plan(model, x, init="random"))
    give_budgets(converted)
    acm.save(converted, folder)


def opened(folder: Path, task: str, data: str | None = None) -> Served:
    """The model saved in `folder`, for a task."""
    return open_served(folder, Given.read(task, data, None), ModelOptions(device="cpu"))


def app_of(
    served: Served,
    *,
    max_body: int = 100_000,
    max_inputs: int = 8,
    limits: Limits | None = None,
    recalibrate: bool = False,
):
    """The app over a served model and its batcher; the model's own state is not shared."""
    from acm_compiler.serving.app import create_app
    from acm_compiler.serving.metrics import Metrics
    from acm_compiler.serving.recalibration import Recalibration

    served, metrics = copy.copy(served), Metrics()
    controller = Controller(Pace({1.0: Line(0.01, 0.001)}), low=0.2, high=1.0)
    limits = limits or Limits(batch=4, wait_s=0.0)
    batcher = Batcher(served.run, controller, limits, metrics, cells=served.reader.cells)
    recalibration = Recalibration(served, is_busy=lambda: False, by_itself=False) if recalibrate else None
    bounds = {"max_body": max_body, "max_inputs": max_inputs}
    return create_app(served, batcher, metrics, **bounds, recalibration=recalibration), batcher, served
