"""What must answer without importing the array libraries."""

import subprocess
import sys

import pytest

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "matplotlib")


def loaded(code: str, modules=HEAVY) -> list[str]:
    """Run code in a fresh process, and say which of the modules it had imported at its end."""
    report = f"""
import sys
try:
    {code}
except SystemExit:
    pass
print('LOADED', *[m for m in {modules!r} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["generate", "--help"],
        ["config", "show", "quickstart"],
        ["config", "show", "quickstart", "--all", "--json"],
        ["config", "show", "quickstart", "train.stepz=3"],
        ["train", "quickstart", "train.stepz=3"],
        ["train", "quickstrat"],
        ["trian"],
        ["explain", "train.steps"],
        ["explain", "model.num_layers"],
        ["report", "no-such-run"],
        ["generate", "no-such-run", "--prompt", "x"],
    ],
)
def test_no_array_library_for(args):
    assert loaded(f"from styrax.core.cli import main; main({args!r})") == []


@pytest.mark.parametrize("name", ["core", "models", "optim", "checkpoint", "data", "train"])
def test_importing_a_library_is_cheap(name):
    assert loaded(f"from styrax import {name}; dir({name})") == []


def test_a_batch_needs_neither_jax_nor_grain(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    (tmp_path / "b.txt").write_text("more text\n" * 50)
    code = (
        "from styrax import data; import pathlib; "
        f"d = data.TokensConfig(sources=({str(tmp_path)!r},), tokenizer='byte', seq_len=8, batch_size=2)"
        f".build(seed=0, cache_dir=pathlib.Path({str(tmp_path / 'cache')!r})); "
        "assert d.batch(3)['tokens'].shape == (2, 8)"
    )
    assert loaded(code, (*HEAVY, "tokenizers")) == []
