"""Sentences for values that do not fit, outside of recipe files: options, saved documents."""

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from acm_compiler.errors import StorageError
from acm_compiler.recipe.messages import checked_json, either, wrong_entry, wrong_values


class Options(BaseModel):
    """Values of every kind that messages know."""

    model_config = ConfigDict(extra="forbid", strict=True)

    learners: int = Field(4, ge=1, le=64)
    share: float = Field(0.5, gt=0, lt=1)
    mode: str = "x"
    budget: float | str = 1.0
    names: tuple[str, ...] = Field(("a",), min_length=1)


def sentences(**values):
    with pytest.raises(ValidationError) as caught:
        Options(**values)
    return wrong_values(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"learners": 0}, ["learners: found 0, expected at least 1"]),
        ({"learners": 65}, ["learners: found 65, expected at most 64"]),
        ({"learners": "4"}, ["learners: found '4', expected a whole number"]),
        ({"share": 0.0}, ["share: found 0.0, expected above 0"]),
        ({"share": 1.0}, ["share: found 1.0, expected below 1"]),
        ({"mode": 3}, ["mode: found 3, expected text"]),
        ({"names": ()}, ["names: found a list of 0, expected at least 1"]),
    ],
    ids=str,
)
def test_a_value_is_shown_beside_what_was_expected(values, expected):
    assert sentences(**values) == expected


def test_the_kinds_that_a_value_may_have_are_one_sentence_and_two_values_two():
    assert sentences(budget=[]) == ["budget: found a list of 0, expected a number or text"]
    assert len(sentences(learners=0, mode=3)) == 2
    assert sentences(lerners=3)[0].startswith("lerners: ")


def test_an_expectation_is_named_once():
    assert either(["a number", "text", "a number"]) == "a number or text"


def test_a_document_is_read_or_refused_by_its_first_fault():
    assert checked_json(Options, '{"learners": 2}', what="no options").learners == 2
    with pytest.raises(StorageError, match=r"here: no options: learners \(found 0, expected at least 1\)\n  again"):
        checked_json(Options, '{"learners": 0}', what="no options", where="here", fix="again")
    with pytest.raises(StorageError, match=r"no options: an unknown key \(found lerners\)"):
        checked_json(Options, '{"lerners": 0}', what="no options")


def test_a_missing_key_and_broken_text_are_named():
    class Needs(BaseModel):
        name: str

    with pytest.raises(StorageError, match=r"bad: a key is missing \(found name\)"):
        checked_json(Needs, "{}", what="bad")
    with pytest.raises(StorageError, match="bad: the document"):
        checked_json(Needs, "{", what="bad")


def test_an_entry_is_refused_by_its_path():
    error = wrong_entry("rules", "gone", "the name of a site", what="unusable")
    assert str(error) == "unusable: rules (found 'gone', expected the name of a site)"
