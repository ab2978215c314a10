"""Facts of data sets: what a user's own object says, and what holds where it says nothing."""

from types import SimpleNamespace

from acm_compiler.data.batch import Facts


def test_what_a_data_set_leaves_out_has_defaults():
    said = Facts.of(SimpleNamespace(classes=["a", "b"], rate=16_000, other=1))
    assert said == Facts(classes=["a", "b"], rate=16_000)
    assert Facts.of(None) == Facts.of(object()) == Facts() and Facts().marks == ()
