"""Run the end of a compiled Triton kernel's TTIR on numbers, with IEEE comparisons: Triton's interpreter runs numpy's.

Only what the choice of a gate is made of: integer arithmetic, comparisons, selections, and reductions over columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import reduce

import numpy as np

_LINE = re.compile(r"^\s*(?P<out>%[\w#:]+) = (?P<op>\"?[\w.]+\"?)(?P<rest>.*)$")
_TWO = {
    "arith.addi": np.add,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum,
}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
Fold = Callable[[Callable, list], tuple]


def stored(ttir: str, given: dict[str, np.ndarray], fold: Fold) -> np.ndarray:
    """The value that the kernel's last `tt.store` writes.

    given: values that are taken as they are. fold: the order of reductions.
    """
    lines = [line.strip() if "^bb" in line else line.split(" loc(")[0].strip() for line in ttir.splitlines()]
    operand = [line for line in lines if line.startswith("tt.store")][-1].split(",")[1].strip()
    return _value(operand, dict(_definitions(lines)), dict(given), fold)


def utility_of(ttir: str) -> str:
    """The name of the utilities: what is compared with itself to find NaN."""
    return re.findall(r"arith.cmpf une, (%\w+), \1 ", ttir)[-1]


def _definitions(lines: list[str]) -> Iterator[tuple[str, tuple[str, str, list[str]]]]:
    """Name, operation, text and, of a reduction, the lines of its region."""
    for place, line in enumerate(lines):
        if match := _LINE.match(line):
            region = [] if match["op"] != '"tt.reduce"' else lines[place + 1 : place + 12]
            yield match["out"].split(":")[0], (match["op"], match["rest"], region)


def _value(name: str, defined: dict, known: dict, fold: Fold) -> np.ndarray:
    if name in known:
        return known[name]
    base, _, part = name.partition("#")
    op, rest, region = defined[base]
    operands = [_value(text, defined, known, fold) for text in re.findall(r"%\w+(?:#\d+)?", rest.split(" : ")[0])]
    if op == '"tt.reduce"':
        known |= {f"{base}#{i}": column for i, column in enumerate(_reduced(operands, region, fold))}
        known[base] = known[f"{base}#0"]
        return known[f"{base}#{part or 0}"]
    known[name] = _computed(op, rest, operands)
    return known[name]


def _computed(op: str, rest: str, operands: list) -> np.ndarray:
    shape = tuple(int(size) for size in re.findall(r"(\d+)x", rest.rpartition("tensor<")[2]))
    if op == "arith.constant":
        text = re.search(r"(?:dense<)?(-?[\w.+-]+)", rest)[1]
        kind = np.uint32 if text.startswith("0x") else np.float32 if "." in text else np.int32
        number = kind(int(text, 16) if kind is np.uint32 else {"true": 1, "false": 0}.get(text, text))
        return np.broadcast_to(number.view(np.float32) if kind is np.uint32 else number, shape)
    if op == "tt.make_range":
        return np.arange(int(re.search(r"end = (\d+)", rest)[1]), dtype=np.int32)
    if op == "tt.expand_dims":
        return np.expand_dims(operands[0], int(re.search(r"axis = (\d)", rest)[1]))
    if op in ("tt.broadcast", "tt.splat"):
        return np.broadcast_to(operands[0], shape)
    if op in ("arith.cmpf", "arith.cmpi"):
        # o..: ordered, u..: unordered, s..: signed; numpy's comparisons with NaN are those of `oeq` and `une`
        return _COMPARE[rest.split(",")[0].strip()[-2:]](*operands)
    if op == "arith.select":
        return np.where(*operands)
    return operands[0].astype(np.int32) if op == "arith.extui" else _TWO[op](*operands)


def _reduced(operands: list, region: list[str], fold: Fold) -> list[np.ndarray]:
    """Reductions over columns, by the region's own operations, in the order of `fold`."""
    names = re.findall(r"(%\w+): ", region[0])
    body = dict(_definitions(region))
    results = next(line for line in region if line.startswith("tt.reduce.return"))

    def combine(a: tuple, b: tuple) -> tuple:
        known = dict(zip(names, (*a, *b), strict=True))
        return tuple(_value(name, body, known, fold) for name in re.findall(r"%\w+", results))

    columns = [tuple(operand[:, c] for operand in operands) for c in range(operands[0].shape[1])]
    return list(fold(combine, columns))


def from_left(combine: Callable, columns: list) -> tuple:
    """((a b) c) d"""
    return reduce(combine, columns)


def from_right(combine: Callable, columns: list) -> tuple:
    """a (b (c d))"""
    return reduce(lambda right, left: combine(left, right), reversed(columns))


def by_halves(combine: Callable, columns: list) -> tuple:
    """(a c) (b d), as lanes of a warp do"""
    half = len(columns) // 2
    if not half:
        return columns[0]
    return by_halves(combine, [combine(a, b) for a, b in zip(columns[:half], columns[half:], strict=True)])
