import pytest

from styrax.core import UsageError, UserError, nearest, registry


def test_names_import_nothing(fake):
    assert registry.names("fake.optim") == ["broken", "sgd"]
    assert registry.names("fake.nothing") == []


def test_resolve(fake):
    assert registry.resolve("fake.optim", "sgd") is fake.Sgd


def test_a_missing_name_says_what_to_do(fake):
    with pytest.raises(UsageError, match=r"no optim named 'sdg' \(did you mean 'sgd'\?\); installed: broken, sgd"):
        registry.resolve("fake.optim", "sdg")
    text = registry.missing("styrax.models", "decoder", [])
    assert text == "no model named 'decoder': nothing installed offers any; pip install styrax-models"
    text = registry.missing("styrax.data", "video", ["tokens"])
    assert text == "no data part named 'video'; installed: tokens; pip install styrax-data"


def test_two_providers_of_one_name(fake):
    with pytest.raises(UserError, match=r"'one' in fake.twice comes from both .* of .* and .* of .*; uninstall one"):
        registry.resolve("fake.twice", "one")


def test_nearest():
    assert nearest("STEPS", ["steps"]) == " (did you mean 'steps'?)"
    assert nearest("x", ["steps"]) == ""
    assert nearest("stops", ["steps", "stop"], n=2) == " (did you mean 'steps' or 'stop'?)" or nearest(
        "stops", ["steps", "stop"], n=2
    ).startswith(" (did you mean")
