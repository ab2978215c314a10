"""Texts as a model's tokens: paragraphs of documentation, or rows that a user's function gives."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from acm_compiler.data.batch import Batch
from acm_compiler.data.paragraphs import draw_paragraphs
from acm_compiler.errors import DataError, counted
from acm_compiler.recipe.datasets import TextData, TextRowsData
from acm_compiler.recipe.lookup import SUFFIX, tokenizer_file
from acm_compiler.sources.from_gguf import tokenizer_files
from acm_compiler.sources.from_python import call_function

_POOL = 16  # batches


class TokenizedTexts(Dataset[Batch]):
    """Texts as tokens of the model's own tokenizer, with numbers about each such as its `source` and `label`.

    An example: `input_ids` and `attention_mask` int64 [tokens], and those numbers. Batches are padded to their longest.
    `mask_id` is the token that hides others, None where there is none; `marks` are all tokens that stand for no text;
    `largest_token` is the highest number of a token in these texts. DataError where no text has a token.
    """

    def __init__(self, texts: Sequence[str], tokenizer: str, *, max_tokens: int, **facts: Sequence[int]) -> None:
        self.texts, self.facts = texts, facts
        self.tokenizer = _open_tokenizer(tokenizer)
        self.mask_id = _first_id(self.tokenizer, ("[MASK]", "<mask>"))
        self.marks = frozenset(
            number for number, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.padding, encoded = _tokenized(self.tokenizer, texts, max_tokens)
        self.tokens = [torch.tensor(ids, dtype=torch.int64) for ids in encoded]
        self.largest_token = max((max(ids) for ids in encoded if ids), default=-1)
        if encoded and self.largest_token < 0:
            raise DataError(
                "the texts must hold tokens, got padding alone",
                where=tokenizer,
                found=f"{len(encoded)} empty texts",
                fix="give texts, and the tokenizer that belongs to the model",
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index]
        facts = {name: torch.tensor(values[index]) for name, values in self.facts.items()}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **facts}

    def collate(self, examples: Sequence[Mapping[str, Tensor]]) -> Batch:
        """Examples padded to the longest of them."""

        def padded(name: str, value: int) -> Tensor:
            rows = [example[name] for example in examples]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

        facts = {name: torch.stack([example[name] for example in examples]) for name in self.facts}
        return {
            "input_ids": padded("input_ids", self.padding),
            "attention_mask": padded("attention_mask", 0),
            **facts,
        }

    def group(self, order: Sequence[int], batch: int) -> list[int]:
        """The same order, with texts of like length brought together within every 16 batches, which saves padding.

        The batches themselves come in no order of length, since often only the first are read.
        """
        place = {index: number for number, index in enumerate(order)}
        whole, size = len(order) - len(order) % batch, _POOL * batch
        pools = [
            sorted(order[start : min(start + size, whole)], key=lambda index: (-len(self.tokens[index]), index))
            for start in range(0, whole, size)
        ]
        batches = [pool[start : start + batch] for pool in pools for start in range(0, len(pool), batch)]
        batches.sort(key=lambda part: min(place[index] for index in part))
        return [index for part in batches for index in part] + list(order[whole:])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, with a space where a word begins if the tokenizer tells words from their parts."""
        return [_written(self.tokenizer, self.tokenizer.id_to_token(i) or str(i)) for i in ids]


class TextSet(TokenizedTexts):
    """At most `count` paragraphs of one split, drawn by `seed`; `label` is their class where there are `classes`.

    `source` is the number of the file or package that a paragraph is from. DataError without texts or tokenizer.
    """

    def __init__(self, config: TextData) -> None:
        drawn = draw_paragraphs(
            config.root, config.split, config.count, seed=config.seed, classes=tuple(config.classes)
        )
        self.sources = [paragraph.source for paragraph in drawn]
        facts = {"source": self.sources}
        if config.classes:
            self.classes = tuple(config.classes)
            facts["label"] = [paragraph.label for paragraph in drawn]
        super().__init__([p.text for p in drawn], config.tokenizer, max_tokens=config.max_tokens, **facts)


class TextRows(TokenizedTexts):
    """The rows that a user's function gives. DataError where there are none, or a text or class in them is none."""

    def __init__(self, config: TextRowsData) -> None:
        every = _rows(config)
        texts = _column(every, config.text, config)
        _refuse_odd(texts, [isinstance(text, str) for text in texts], config, "text", fix="leave such rows out")
        facts: dict[str, list[int]] = {}
        if config.label:
            labels = _column(every, config.label, config)
            fix = "number the classes (datasets: class_encode_column), and leave out rows without one"
            _refuse_odd(labels, [_is_class(label) for label in labels], config, "class 0, 1, 2, …", fix=fix)
            facts["label"] = [operator.index(label) for label in labels]
        super().__init__(texts, config.tokenizer, max_tokens=config.max_tokens, **facts)


def _rows(config: TextRowsData) -> list[Any]:
    """Call the function for its rows; DataError where that is not a sequence with entries."""
    try:
        rows = call_function(config.rows, config.args)
    except (OSError, ValueError) as error:
        raise DataError(
            "the function of the rows found no data", where=config.rows, found=error, fix="check data.args"
        ) from error
    if isinstance(rows, Mapping):
        raise DataError(
            "the function gave several sets of rows",
            where=config.rows,
            found=", ".join(map(str, rows)),
            expected="one",
            fix="ask for one in `args`, as in {split: train}, or give the folder of that one alone",
        )
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or not len(rows):
        found = f"{type(rows).__name__} without rows"
        fix = "give a list, or a set that is not streamed"
        raise DataError("the function gave no rows", where=config.rows, found=found, expected="mappings", fix=fix)
    try:
        return [rows[i] for i in range(len(rows))]
    except LookupError as error:
        raise DataError(
            "the function gave no rows by number",
            where=config.rows,
            found=f"{type(rows).__name__}: {error!r}",
            expected="a sequence of mappings",
            fix="give a list of mappings, such as frame.to_dict('records') of a table of pandas",
        ) from error


def _column(rows: Sequence[Any], key: str, config: TextRowsData) -> list[Any]:
    """The values of all rows under `key`; DataError, with the first of them, where a row has none."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or key not in row:
            raise DataError(
                f"row {number} has no {key!r}",
                where=config.rows,
                found=", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__,
                expected=f"a mapping with {key!r}",
                fix="name the rows' own keys by `text` and `label`, or leave such rows out",
            )
    return [row[key] for row in rows]


def _refuse_odd(values: Sequence[Any], good: Sequence[bool], config: TextRowsData, what: str, *, fix: str) -> None:
    """DataError, with the first of them and their number, where `values` are not all good."""
    if not all(good):
        first, count = good.index(False), good.count(False)
        raise DataError(
            f"{count} of {counted(len(good), 'row')} have no {what}",
            where=config.rows,
            found=f"{values[first]!r} in row {first}",
            fix=fix,
        )


def _is_class(label: Any) -> bool:
    try:
        return operator.index(label) >= 0
    except TypeError:
        return False


def _tokenized(tokenizer: Any, texts: Sequence[str], most: int) -> tuple[int, list[list[int]]]:
    """The id of padding, and each text's ids with the tokenizer's own marks at the ends."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(most)
    return _first_id(tokenizer, ("[PAD]", "<pad>")) or 0, [
        encoding.ids for encoding in tokenizer.encode_batch(list(texts))
    ]


def _first_id(tokenizer: Any, names: Sequence[str]) -> int | None:
    return next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)


def _written(tokenizer: Any, token: str) -> str:
    """A token without the marks of its kind: of bytes (Ġmodel), of parts of words (##el), of words (▁model)."""
    kind = type(tokenizer.decoder).__name__
    if kind == "ByteLevel":
        return str(tokenizer.decoder.decode([token]))
    if kind == "WordPiece":
        return token[2:] if token.startswith("##") else f" {token}"
    return token.replace("▁", " ")


def _open_tokenizer(where: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError("tokenizers is not installed", fix="pip install 'acm_compiler[hf]'") from error
    path = tokenizer_file(where)
    if path.suffix == SUFFIX:
        return Tokenizer.from_str(tokenizer_files(path)["tokenizer.json"].decode())
    return Tokenizer.from_file(str(path))
