import dataclasses
from collections.abc import Iterator

import pytest

from styrax.core import MeshConfig, UserError, registry
from styrax.core.cli import main
from styrax.core.config.types import hints, tables, words
from styrax.train import TrainConfig


def test_values_from_python_are_checked():
    with pytest.raises(UserError) as caught:
        TrainConfig(steps=2**31, seed=2**32, sample_temperature=float("nan"), accumulate=1.5)  # pyright: ignore[reportArgumentType]
    names = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert names == ["steps", "seed", "accumulate", "sample_temperature"]


def numbers(cls: type) -> Iterator[tuple[type, str]]:
    """Every field of a config, and of those within it, that takes a number."""
    for name, annotation in hints(cls).items():
        inner = tables(annotation).values()
        if any(word in words(annotation) for word in ("number", "integer")) and not inner:
            yield cls, name
        for each in inner:
            yield from numbers(each)


GROUPS = ("models", "data", "optim", "checkpoint")
CONFIGS = [registry.resolve(f"styrax.{g}", name) for g in GROUPS for name in registry.names(f"styrax.{g}")]


NUMBERS = list(dict.fromkeys(n for cls in [TrainConfig, MeshConfig, *CONFIGS] for n in numbers(cls)))


@pytest.mark.parametrize(("cls", "name"), NUMBERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2**80])
def test_no_part_takes_a_number_that_is_none(cls, name, bad):
    needed = {f.name: 1 for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING}
    with pytest.raises(ValueError, match=name):
        cls(**{**needed, name: bad})


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--seed", "99999999999999999999"], ["--seed: expected integer >= 0, <= 4294967295, got an integer of 67"]),
        (["--prompt", "\udcff\udcfe"], [r"--prompt '\udcff\udcfe' is not UTF-8 text"]),
        (["--max-tokens", "-1", "--temperature", "inf"], ["--max-tokens: expected", "--temperature: expected"]),
    ],
)
def test_wrong_options_of_generate(options, messages, tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")
    assert main(["generate", str(tmp_path), "--prompt", "a", *options]) == 2
    err = capsys.readouterr().err
    assert all(message in err for message in messages)
    assert "bug" not in err
