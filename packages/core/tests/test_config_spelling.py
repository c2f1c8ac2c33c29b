"""Keys that files call otherwise than Python does, and keys that say the kind of a section."""

from dataclasses import dataclass, field

import pytest

from styrax.core import UsageError
from styrax.core.config import Choice, Schema, build, check
from styrax.core.config.describe import describe


@dataclass(frozen=True, kw_only=True)
class Link:
    """From one place to another.

    Attributes:
        source: Where it begins.
        target: Where it ends.
    """

    source: str = field(default="", metadata={"spelling": "from"})
    target: str = "b"

    def __post_init__(self) -> None:
        check(self)


def said(call, *args):
    with pytest.raises(UsageError) as caught:
        call(*args)
    return str(caught.value).splitlines()


def test_a_field_is_set_by_either_name_and_not_by_both():
    schema = Schema(sections={"link": Link})
    for name in ("from", "source"):
        found = schema.resolve({}, [f"link.{name}=a"])
        assert found["link"] == Link(source="a")
        assert found.diff() == {"link": {"source": "a"}}
    assert said(build, Link, {"from": "a", "source": "a", "frm": 1}, "link") == [
        "link.from: it says what link.source says; leave one of them out",
        "link.frm: unknown key; known: source, target",
    ]
    assert said(build, Link, {"from": 3}, "link") == ['link.from: expected string, got 3 (text is written "3")']
    entry = describe(schema, "link.from", schema.resolve({"link": {"from": "a"}}))
    assert (entry.path, entry.doc, entry.value) == ("link.source", "Where it begins.", "a")


def test_a_key_can_say_the_kind(fake):
    schema = Schema(sections={"part": Choice(group="fake.optim", implied={"clip": "sgd", "size": "needy"})})
    assert schema.resolve({"part": {"clip": 2.0}}).kinds == {"part": "sgd"}
    assert schema.resolve({"part": {"clip": 2.0, "kind": "sgd"}})["part"].clip == 2.0
    assert schema.resolve({}).sections == {}
    assert said(schema.resolve, {"part": {"clip": 2.0, "kind": "other"}}) == [
        'part.clip: it means kind = "sgd", and part.kind is "other"; leave one out'
    ]
    assert said(schema.resolve, {"part": {"clip": 2.0}}, ["part.size=3"]) == [
        'part.size: it means kind = "needy", and part.kind is "sgd"; leave one out'
    ]
    assert describe(schema, "part.clip").default == 1.0
