"""Paragraphs of English in text files, or in the documentation of whatever Python packages are installed."""

from __future__ import annotations

import functools
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from acm_compiler.data.draws import derive
from acm_compiler.errors import DataError
from acm_compiler.recipe.package_paths import installed_path

_PROSE = (".md", ".rst", ".txt")
# of one source no more than this is read, so that no package speaks for all
_MOST_FILES, _MOST_PARAGRAPHS = 16, 40
_MOST_OF_CLASS = 4000
_FEWEST_WORDS, _FEWEST_LETTERS = 8, 0.88
_EVAL_SHARE = 0.25
_QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)  # most of a module's long texts are docstrings
_NOT_PROSE = re.compile(r">>>|::|:param|https?:|[{}<>|=\\]")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text, the number of the source (file or package) that it is from, and its class, -1 where there are none."""

    text: str
    source: int
    label: int


@functools.lru_cache(maxsize=4)  # a run opens its data sets again and again
def draw_paragraphs(
    root: str | None, split: str, count: int, *, seed: int, classes: tuple[str, ...] = ()
) -> tuple[Paragraph, ...]:
    """At most `count` paragraphs of a split, drawn by `seed`; with `classes`, of these packages or folders alone.

    DataError where there are none, or none of a class.
    """
    every = _labelled(root, classes) if classes else ((name, text, -1) for name, text in _paragraphs(root))
    found = [Paragraph(text, zlib.crc32(name.encode()), label) for name, text, label in every if _is_of(split, name)]
    missing = [name for label, name in enumerate(classes) if not any(p.label == label for p in found)]
    if missing or not found:
        raise DataError(
            f"no English paragraphs for data.{split}" + (f" of {', '.join(missing)}" if missing else ""),
            where=root or "documentation of installed packages",
            expected=f"text files with paragraphs of {_FEWEST_WORDS} words or more, of several sources",
        )
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(derive(seed)))[:count].tolist()
    return tuple(found[i] for i in order)


def _labelled(root: str | None, classes: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """(file, paragraph, class) of each class, each paragraph once and a class at most so often."""
    seen: set[str] = set()
    for label, name in enumerate(classes):
        folder = _folder_of(root, name)
        kept = 0
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", *_PROSE)):
            for text in _paragraphs_of(path) if kept < _MOST_OF_CLASS else ():
                if text not in seen:
                    seen.add(text)
                    kept += 1
                    yield f"{name}/{path.relative_to(folder)}", text, label


def _folder_of(root: str | None, name: str) -> Path:
    """The folder of a class: below `root`, or an installed package's."""
    if root is not None:
        places = [Path(installed_path(root)) / name]
    else:
        places = [Path(sysconfig.get_paths()[place]) / name for place in ("purelib", "platlib", "stdlib")]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise DataError("there is no folder or package of a class", where="data.classes", found=name)
    return found


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
