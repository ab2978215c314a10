"""The kinds of values that a recipe's keys hold, beyond plain numbers and text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from acm_compiler.errors import UsageError
from acm_compiler.recipe.messages import wrong_values

T = TypeVar("T")


class Section(BaseModel):
    """One mapping of a recipe: frozen, unknown keys refused, no value turned into another type."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Argument(Section):
    """A section that Python code makes, too: what does not fit there is a UsageError."""

    called: ClassVar[str]
    sample: ClassVar[str]

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            faults = "; ".join(wrong_values(error))
            raise UsageError(faults, where=self.called, expected=f"such as {self.sample}") from None

    # pydantic's mark of its own __init__: recipes are read without it, so that their faults keep line and column
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class PathLike:
    """Marks a field whose text (or whose texts, for a mapping) is a path: `${VAR}` and `~/` may be used in it."""


def refusal(what: str, key: str | None = None) -> PydanticCustomError:
    """The error for values that types and bounds let pass, at `key` of the section, or at the section itself."""
    return PydanticCustomError("acm", "{what}", {"what": what} | ({} if key is None else {"key": key}))


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _list_to_three(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise _expected("a list of 3")
    return tuple(value)


def _text_to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _list_to_tuple(value)


Auto = Literal["auto"]
Many = Annotated[tuple[T, ...], BeforeValidator(_list_to_tuple)]
Two = Annotated[tuple[T, T], BeforeValidator(_list_to_tuple)]
Three = Annotated[tuple[T, T, T], BeforeValidator(_list_to_three)]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_text_to_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Budget = Annotated[float, Field(gt=0, le=1)]
PathText = Annotated[str, Field(min_length=1), PathLike()]
FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
PythonKind = Annotated[str, Field(pattern=f"^python:{FUNCTION}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Interval between two events: every `amount` seconds, optimizer steps, or epochs."""

    amount: float
    unit: Literal["second", "step", "epoch"]

    def __str__(self) -> str:
        """The text that recipes hold: `10min`, `500steps`, `1epoch`."""
        if self.unit != "second":
            return f"{self.amount:.0f}{self.unit}{'' if self.amount == 1 else 's'}"
        for name, seconds in (("h", 3600), ("min", 60)):
            if self.amount % seconds == 0:
                return f"{self.amount / seconds:.0f}{name}"
        return f"{self.amount:f}".rstrip("0").rstrip(".") + "s"


_UNITS: dict[str, tuple[float, Literal["second", "step", "epoch"]]] = {
    "s": (1, "second"),
    "min": (60, "second"),
    "h": (3600, "second"),
    "step": (1, "step"),
    "steps": (1, "step"),
    "epoch": (1, "epoch"),
    "epochs": (1, "epoch"),
}
_EVERY = re.compile(r"(\d+(?:\.\d+)?)\s*(\w+)", re.ASCII)


def parse_every(value: Any) -> Every:
    """The `Every` that `10min`, `30s`, `1h`, `500steps` or `1epoch` stands for."""
    if isinstance(value, Every):
        return value
    match = _EVERY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise _expected("a number with a unit, such as 30s, 10min, 1h, 500steps or 1epoch")
    factor, unit = _UNITS[match[2]]
    amount = float(match[1]) * factor
    if amount <= 0 or (unit != "second" and not amount.is_integer()):
        raise _expected("more than nothing, and whole steps or epochs")
    return Every(amount=amount, unit=unit)


def _parse_every_step(value: Any) -> Every:
    every = parse_every(value)
    if every.unit == "second":
        raise _expected("a number of steps or epochs, such as 500steps or 1epoch")
    return every


def _expected(what: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "expected {what}", {"what": what})


_EVERY_SCHEMA = WithJsonSchema({"type": "string", "examples": ["10min", "500steps", "1epoch"]})
Interval = Annotated[Every, PlainValidator(parse_every), PlainSerializer(str), _EVERY_SCHEMA]
StepInterval = Annotated[Every, PlainValidator(_parse_every_step), PlainSerializer(str), _EVERY_SCHEMA]
