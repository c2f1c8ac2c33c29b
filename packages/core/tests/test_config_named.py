"""Sections of tables by name, each of a kind of its own, and what they take from another section."""

import pytest

from styrax.core import UsageError
from styrax.core.config import Choice, Named, Schema
from styrax.core.config.describe import describe


@pytest.fixture
def schema(fake):
    """The fake optimizers, and more of them by name; `clip` is taken from the first, `rate` is another by default."""
    more = Named(group="fake.optim", default="sgd", like="optim", keys=("clip",), defaults={"rate": 0.5})
    return Schema(sections={"optim": Choice(group="fake.optim", default="sgd"), "more": more})


def test_what_a_table_does_not_say_it_takes_from_the_other_section(schema):
    tree = {"optim": {"clip": 3.0, "rate": 0.25}, "more": {"a": {}, "b": {"clip": "none", "rate": 0.1}}}
    found = schema.resolve(tree)
    assert (found["more"]["a"].clip, found["more"]["a"].rate) == (3.0, 0.5)
    assert (found["more"]["b"].clip, found["more"]["b"].rate) == (None, 0.1)
    assert found.kinds == {"optim": "sgd", "more.a": "sgd", "more.b": "sgd"}
    # rate = 0.1 is the class's default, but not the section's.
    assert found.diff() == {**tree, "more": {"a": {}, "b": {"clip": None, "rate": 0.1}}}
    assert schema.resolve(found.diff()) == schema.resolve(found.to_dict()) == found
    assert found.to_dict()["more"]["a"]["kind"] == "sgd"
    # What is written down goes on taking it from there.
    assert schema.resolve(found.to_dict(), ["optim.clip=4.0"])["more"]["a"].clip == 4.0
    assert schema.resolve(found.to_dict(), ["optim.clip=4.0"])["more"]["b"].clip is None


def test_no_tables_leave_nothing_behind(schema):
    found = schema.resolve({})
    assert found["more"] == {}
    assert "more" not in found.to_dict()
    assert found.diff() == {}


def test_all_mistakes_of_all_tables_are_told(schema):
    with pytest.raises(UsageError) as caught:
        schema.resolve({"more": {"a": {"rat": 1}, "b": 3, "c d": {}, "e": {"kind": "sgdd"}}}, ["more.f.clip=-1"])
    said = str(caught.value).splitlines()
    assert [line.partition(" (")[0] for line in said[:3]] == [
        "more.a.rat: unknown key",
        "more.b: expected table, got 3",
        'more."c d": expected a name of letters, digits, _ and -',
    ]
    assert said[3].startswith("more.e.kind: no optim named 'sgdd'")
    assert said[4] == 'more.f.clip: expected number > 0.0 or "none", got -1'


def test_keys_of_a_table_are_explained(schema):
    assert describe(schema, "more.NAME.rate").default == 0.5
    assert describe(schema, "optim.rate").default == 0.1
    found = describe(schema, "more")
    assert found.path == "more.NAME"
    assert {key.path for key in found.keys} >= {"more.NAME.kind", "more.NAME.rate", "more.NAME.schedule"}
    resolved = schema.resolve({"more": {"a": {"schedule": {"warmup": 7}}}})
    assert describe(schema, "more.a.schedule.warmup", resolved).value == 7
    assert describe(schema, "more.a.kind", resolved).value == "sgd"
    assert "tables by name" in describe(schema, "").keys[1].type
