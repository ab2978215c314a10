"""GGUF files: config, weights and tokenizer, each as transformers reads it. No hub is asked."""

from __future__ import annotations

import contextlib
import mmap
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from torch import nn

from acm_compiler.errors import ModelSourceError, a_few_of
from acm_compiler.sources.builders import FAILURES, in_one_line

# what transformers and gguf raise for files that are cut off, damaged, or of an architecture they do not know
_FAILURES = (*FAILURES, OSError, MemoryError, struct.error)
# classes of models that write text, the one with the most models first
_WRITERS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# keys of configs that give linears biases, which no GGUF file names, by the part of a block that these belong to
_BIASES = {"mlp_bias": "ffn_", "attention_bias": "attn_"}
_FIRST_BLOCK, _NAMES = b"blk.0.", 2**22  # how its tensors are named, and the bytes that all names take at most


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Keep what the package gguf has parsed until the end: transformers asks for it again and again.

    It opens a file for its config and once more for its weights, and maps the names of tensors for every module of the
    model: seconds each time.
    """
    with contextlib.ExitStack() as kept:
        if find_spec("gguf") is not None:
            import gguf

            for name in ("GGUFReader", "get_tensor_name_map"):
                kept.enter_context(mock.patch.object(gguf, name, lru_cache(getattr(gguf, name))))
        yield


def read_config(path: Path, **changes: Any) -> tuple[Any, list[str]]:
    """The config of the model in a GGUF file, with `changes`, and the keys of `changes` that it lacks.

    Linears have biases where the file has some: transformers asks the file's settings alone, and drops them in silence.
    """
    from transformers import AutoConfig

    with _reading(path, "model"):
        settings, unused = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, return_unused_kwargs=True, local_files_only=True, **changes
        )
        for key, part in _BIASES.items():
            if key not in changes and getattr(settings, key, None) is False and _has_bias(path, part):
                setattr(settings, key, True)
    return settings, [key for key in unused if key in changes]


def _has_bias(path: Path, part: str) -> bool:
    """True if a tensor of this part of the first block is a bias.

    Names of tensors lie in one piece, as they are, behind the vocabulary, which takes the package seconds to read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        first = max(0, content.find(_FIRST_BLOCK))
        return re.search(_FIRST_BLOCK + part.encode() + rb"\w*\.bias", content[first : first + _NAMES]) is not None


def read_model(path: Path, auto: Any, settings: Any) -> nn.Module:
    """The model in a GGUF file with its weights unpacked, by an auto class of transformers.

    ModelSourceError where the file lacks a weight of the model, or has one of another shape.
    """
    with _reading(path, "weights"):
        model, found = auto.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            config=settings,
            local_files_only=True,
            output_loading_info=True,
            **_unpacked(),
        )
    if missing := sorted(found["missing_keys"]):
        raise ModelSourceError(
            "the GGUF file lacks weights of the model",
            where=str(path),
            found=a_few_of(missing),
            fix="give the file of the whole model (not a part of a split one), or another auto_class",
        )
    return model


def _unpacked() -> dict[str, Any]:
    """The arguments that keep transformers from leaving weights packed, where it has learned to."""
    import transformers

    known = getattr(transformers, "GgufConfig", None)
    return {} if known is None else {"quantization_config": known(dequantize=True)}


def writer_of(settings: Any) -> str:
    """The auto class of a model that writes text, as GGUF files hold; AutoModel where it writes none."""
    import transformers

    classes = (name for name in _WRITERS if type(settings) in getattr(transformers, name)._model_mapping)
    return next(classes, "AutoModel")


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The files that transformers writes for the tokenizer in a GGUF file; by name."""
    return _tokenizer_files(path.absolute(), path.stat().st_mtime_ns)


@lru_cache(maxsize=2)  # each data set of a run asks for it, and it takes seconds
def _tokenizer_files(path: Path, _: int) -> dict[str, bytes]:
    """Files of the tokenizer in a GGUF file that was last written at a time.

    AutoTokenizer of early releases chooses a class by the model's architecture, which may add a first token.
    """
    with _reading(path, "tokenizer"), TemporaryDirectory() as folder:
        from transformers import PreTrainedTokenizerFast

        read = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        read.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


@contextlib.contextmanager
def _reading(path: Path, part: str) -> Iterator[None]:
    """Turns what transformers raises at a GGUF file, or without the package that reads it, into a ModelSourceError."""
    if find_spec("gguf") is None:
        raise ModelSourceError("the package gguf is not installed", where=str(path), fix="pip install gguf")
    try:
        yield
    except _FAILURES as error:
        raise ModelSourceError(
            f"transformers cannot read the {part} in this GGUF file",
            where=str(path),
            found=f"{type(error).__name__}: {in_one_line(error)}",
            fix="give a whole file, of an architecture and quantization that transformers reads",
        ) from error
