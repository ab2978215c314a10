"""Paragraphs of prose in text files, or in the documentation of whatever Python packages are installed."""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from acm_compiler.data.draws import derive
from acm_compiler.errors import DataError, counted
from acm_compiler.recipe.load import installed_path

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

    DataError where there are none, or none of a class, with what is there instead.
    """
    every = _labelled(root, classes) if classes else ((name, text, -1) for name, text in _paragraphs(root))
    found = [Paragraph(text, zlib.crc32(name.encode()), label) for name, text, label in every if _is_of(split, name)]
    missing = [name for label, name in enumerate(classes) if not any(p.label == label for p in found)]
    if missing or not found:
        raise _nothing_found(root, split, missing[0] if missing else None)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(derive(seed)))[:count].tolist()
    return tuple(found[i] for i in order)


def _labelled(root: str | None, classes: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """(file, paragraph, class) of each class, each paragraph once and a class at most so often."""
    seen: set[str] = set()
    for label, name in enumerate(classes):
        folder = _folder_of(root, name)
        kept = 0
        for path in _files(folder, (".py", *_PROSE)):
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
        own = (sysconfig.get_paths()[place] for place in ("purelib", "platlib", "stdlib"))
        places = [Path(place) / name for place in (*own, *sys.path)]  # packages of a user or the system lie elsewhere
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise DataError(
            "a class must be a folder with texts, or an installed package",
            where="data.classes",
            found=name,
            fix="correct the name, set root to the folder that holds it, or install the package",
        )
    return found


def _is_of(split: str, source: str) -> bool:
    """True if the whole source is of that split, whatever else there is: by a digest of its name."""
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
        for path in _files(folder, _PROSE):
            yield str(path.relative_to(folder)), [path]
        return
    for place in ("stdlib", "purelib"):
        for entry in sorted(Path(sysconfig.get_paths()[place]).iterdir()):
            if entry.suffix == ".py":
                yield entry.stem, [entry]
            elif (entry / "__init__.py").exists():
                yield entry.name, sorted(p for p in entry.iterdir() if p.suffix in (".py", *_PROSE))


def _files(folder: Path, kinds: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in kinds)


def _paragraphs_of(path: Path) -> Iterator[str]:
    return (text for text in _parts_of(path) or () if _flaw(text) is None)


def _parts_of(path: Path) -> list[str] | None:
    """Texts between empty lines of a file, None for one that is no text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    parts = _QUOTED.findall(text) if path.suffix == ".py" else [text]
    flat = (" ".join(paragraph.split()) for part in parts for paragraph in re.split(r"\n\s*\n", part))
    return [paragraph for paragraph in flat if paragraph]


def _flaw(text: str) -> str | None:
    """Reason why a paragraph is no prose, None where it is."""
    if not text[0].isupper():
        return "paragraphs beginning without a capital"
    if text[-1] not in ".!?":
        return "paragraphs ending without . ! ?"
    if len(text.split()) < _FEWEST_WORDS:
        return f"paragraphs of fewer than {_FEWEST_WORDS} words"
    letters = sum(c.isalpha() or c == " " for c in text) / len(text)
    return "paragraphs like code or tables" if letters < _FEWEST_LETTERS or _NOT_PROSE.search(text) else None


def _nothing_found(root: str | None, split: str, name: str | None) -> DataError:
    """Describe what is there instead of paragraphs: of the class `name`, or of all sources where that is None."""
    where, files = _looked_at(root, name)
    parts = [_parts_of(path) for path in files]
    flaws = [_flaw(text) for part in parts if part for text in part]
    expected = f"prose of {_FEWEST_WORDS} words or more, from a capital to a full stop"
    fix = "give other texts, or text_rows with a function that reads yours"
    if not files:
        what, found, expected = "no text files", _content(Path(where)), f"files of {', '.join(_PROSE)}"
    elif None in flaws:
        what, found = "no paragraphs", f"{flaws.count(None):,} in {counted(len(files), 'file')}, but of the other split"
        expected = "texts of several sources"
        fix = "give more files: each is in one split, which its name draws (about a quarter are for eval)"
    else:
        left_out = [("not UTF-8", parts.count(None)), *Counter(flaws).most_common()]
        counts = [counted(len(files), "file"), *(f"{flaw}: {count:,}" for flaw, count in left_out if count)]
        what, found = "no paragraphs of prose", ", ".join(counts)
    return DataError(f"{what} for data.{split}", where=where, found=found, expected=expected, fix=fix)


def _looked_at(root: str | None, name: str | None) -> tuple[str, list[Path]]:
    """The place where texts were searched for, and all files there."""
    if name is not None:
        folder = _folder_of(root, name)
        return str(folder), _files(folder, (".py", *_PROSE))
    if root is not None:
        return installed_path(root), _files(Path(installed_path(root)), _PROSE)
    return "documentation of installed packages", [path for _, paths in _sources(None) for path in paths]


def _content(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    count = sum(path.is_file() for path in folder.rglob("*"))
    return f"files of other kinds: {count:,}" if count else "an empty folder"
