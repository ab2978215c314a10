"""Paragraphs of English from text files, or from the documentation of whatever Python packages are installed."""

from __future__ import annotations

import functools
import re
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from acm_compiler.data.batch import Batch
from acm_compiler.data.draws import derive
from acm_compiler.errors import DataError
from acm_compiler.recipe.datasets import TextData
from acm_compiler.recipe.package_paths import installed_path

_PROSE = (".md", ".rst", ".txt")
# of one source no more than this is read, so that no package speaks for all
_MOST_FILES, _MOST_PARAGRAPHS = 16, 40
_FEWEST_WORDS, _FEWEST_LETTERS = 8, 0.88
_EVAL_SHARE = 0.25
_QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)  # most of a module's long texts are docstrings
_NOT_PROSE = re.compile(r">>>|::|:param|https?:|[{}<>|=\\]")


class TextSet(Dataset[Batch]):
    """At most `count` paragraphs of one split, drawn by `seed`, as tokens of the model's own tokenizer.

    An example: `input_ids` and `attention_mask` int64 [tokens], `source`: the number of the file or package it is
    from. Batches are padded to their longest. DataError without texts or tokenizer.
    """

    def __init__(self, config: TextData) -> None:
        self.texts, self.sources = _drawn(config.root, config.split, config.count, config.seed)
        self.padding, encoded = _tokenized(config.tokenizer, self.texts, config.max_tokens)
        self.tokens = [torch.tensor(ids) for ids in encoded]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "source": torch.tensor(self.sources[index])}

    def collate(self, examples: Sequence[Mapping[str, Tensor]]) -> Batch:
        """Examples padded to the longest of them."""

        def padded(name: str, value: int) -> Tensor:
            rows = [example[name] for example in examples]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

        return {
            "input_ids": padded("input_ids", self.padding),
            "attention_mask": padded("attention_mask", 0),
            "source": torch.stack([example["source"] for example in examples]),
        }


@functools.lru_cache(maxsize=4)  # a run opens its data sets again and again
def _drawn(root: str | None, split: str, count: int, seed: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    found = [(text, zlib.crc32(name.encode())) for name, text in _paragraphs(root) if _is_of(split, name)]
    if not found:
        raise DataError(
            f"no English paragraphs for data.{split}",
            where=root or "documentation of installed packages",
            expected=f"text files with paragraphs of {_FEWEST_WORDS} words or more, of several sources",
        )
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(derive(seed)))[:count].tolist()
    return tuple(found[i][0] for i in order), tuple(found[i][1] for i in order)


def _is_of(split: str, source: str) -> bool:
    """Whole sources belong to one split, whatever else there is: by a digest of their names."""
    held_out = zlib.crc32(b"split " + source.encode()) < _EVAL_SHARE * 2**32
    return held_out == (split == "eval")


def _paragraphs(root: str | None) -> Iterator[tuple[str, str]]:
    """(source, paragraph) of all sources, each paragraph once."""
    seen: set[str] = set()
    for name, files in _sources(root):
        kept = 0
        for path in files[:_MOST_FILES]:
            for text in _paragraphs_of(path):
                if text not in seen and kept < _MOST_PARAGRAPHS:
                    seen.add(text)
                    kept += 1
                    yield name, text
            if kept >= _MOST_PARAGRAPHS:
                break


def _sources(root: str | None) -> Iterator[tuple[str, list[Path]]]:
    """Name and files of each source: each file below a folder, or each installed package."""
    if root is not None:
        folder = Path(installed_path(root))
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _PROSE):
            yield str(path.relative_to(folder)), [path]
        return
    for place in ("stdlib", "purelib"):
        for entry in sorted(Path(sysconfig.get_paths()[place]).iterdir()):
            if entry.suffix == ".py":
                yield entry.stem, [entry]
            elif (entry / "__init__.py").exists():
                yield entry.name, sorted(p for p in entry.iterdir() if p.suffix in (".py", *_PROSE))


def _paragraphs_of(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    for part in _QUOTED.findall(text) if path.suffix == ".py" else [text]:
        for paragraph in re.split(r"\n\s*\n", part):
            flat = " ".join(paragraph.split())
            if _is_prose(flat):
                yield flat


def _is_prose(text: str) -> bool:
    if not text or not text[0].isupper() or text[-1] not in ".!?" or len(text.split()) < _FEWEST_WORDS:
        return False
    letters = sum(c.isalpha() or c == " " for c in text) / len(text)
    return letters >= _FEWEST_LETTERS and not _NOT_PROSE.search(text)


def _tokenized(where: str, texts: Sequence[str], most: int) -> tuple[int, list[list[int]]]:
    """The id of padding, and each text's ids with the tokenizer's own marks at the ends."""
    tokenizer: Any = _open_tokenizer(where)
    tokenizer.no_padding()
    tokenizer.enable_truncation(most)
    padding = next((i for mark in ("[PAD]", "<pad>") if (i := tokenizer.token_to_id(mark)) is not None), 0)
    return padding, [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def _open_tokenizer(where: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError("tokenizers is not installed", fix="pip install 'acm_compiler[hf]'") from error
    path = Path(installed_path(where))
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError("no tokenizer", where="data.tokenizer", found=str(path), expected="a tokenizer.json")
    return Tokenizer.from_file(str(path))
