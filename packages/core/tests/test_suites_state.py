"""The suites for iterators and checkpointers accept a right part and refuse wrong ones, each for its own fault."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - numpy learns bfloat16 from it
import numpy as np
import pytest

from styrax.core import protocols, tree
from styrax.core.testing import check_checkpointer, check_iterator

# Iterators


class Numbers:
    """A right iterator over ten batches."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.step == 10:
            raise StopIteration
        self.step += 1
        return {"x": np.arange(3) + self.step}

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]


class ReusesItsBuffer(Numbers):
    """Allowed: every batch is the same array with new contents."""

    buffer = np.zeros(3, np.int64)

    def __next__(self):
        self.buffer[:] = super().__next__()["x"]
        return {"x": self.buffer}


class OffByOne(Numbers):
    def set_state(self, state):
        self.step = state["step"] + 1


class Forgets(Numbers):
    def __init__(self):
        super().__init__()
        self.hidden = 0

    def __next__(self):
        self.hidden += 1
        return {"x": super().__next__()["x"] * self.hidden}


class Drifts(Numbers):
    def get_state(self):
        self.step += 1
        return {"step": self.step - 1}


class NotJson(Numbers):
    def get_state(self):
        return {"step": np.int64(self.step)}


class Tuples(Numbers):
    def get_state(self):
        return {"step": (self.step,)}


class Large(Numbers):
    def get_state(self):
        return {"step": self.step, "buffer": [0] * 100_000}


class Short(Numbers):
    def __next__(self):
        if self.step == 3:
            raise StopIteration
        return super().__next__()


@pytest.mark.parametrize("good", [Numbers, ReusesItsBuffer])
def test_a_right_iterator(good):
    assert isinstance(good(), protocols.DataIterator)
    check_iterator(good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (OffByOne, "reads back"),
        (Forgets, "batch 0 from there"),
        (Drifts, "get_state changed the state"),
        (NotJson, "must be plain JSON"),
        (Tuples, "changes on its way through JSON"),
        (Large, "bytes, at most"),
        (Short, "the iterator ended"),
    ],
)
def test_a_wrong_iterator(bad, message):
    with pytest.raises(AssertionError, match=message):
        check_iterator(bad)


# Checkpointers


class Folders:
    """A right checkpointer: a folder a step, renamed into place when it is whole."""

    def __init__(self, directory: Path):
        self.directory = Path(directory)

    def save(self, step, items):
        partial = self.directory / f"{step}.partial"
        partial.mkdir(parents=True)
        for name, item in items.items():
            self.write(partial / name, item)
        partial.rename(self.directory / str(step))

    def write(self, folder, item):
        folder.mkdir()
        flat = tree.flatten(item)
        if flat and all(hasattr(leaf, "dtype") for leaf in flat.values()):
            for number, (path, leaf) in enumerate(flat.items()):
                array = np.asarray(leaf)
                (folder / str(number)).write_bytes(array.tobytes())
                (folder / f"{number}.json").write_text(json.dumps([path, array.shape, str(array.dtype)]))
        else:
            (folder / "item.json").write_text(json.dumps(item))

    def restore(self, step, like):
        if step not in self.steps():
            raise ValueError(f"no step {step}")
        return {name: self.read(self.directory / str(step) / name, abstract) for name, abstract in like.items()}

    def read(self, folder, like):
        if not folder.exists():
            raise ValueError(f"no item {folder.name}")
        if (folder / "item.json").exists():
            return json.loads((folder / "item.json").read_text())
        flat = {}
        for meta in folder.glob("*.json"):
            path, shape, dtype = json.loads(meta.read_text())
            flat[path] = np.frombuffer(meta.with_suffix("").read_bytes(), np.dtype(dtype)).reshape(shape)
        return flat_to_nested(flat) if like is None else tree.unflatten(like, flat)

    def steps(self):
        names = [path.name for path in self.directory.glob("*")] if self.directory.exists() else []
        return sorted(int(name) for name in names if name.isdigit())

    def wait(self):
        pass

    def close(self):
        pass


def flat_to_nested(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested


class LosesBfloat16(Folders):
    def write(self, folder, item):
        def widen(leaf):
            return np.asarray(leaf, np.float32) if getattr(leaf, "dtype", None) == jnp.bfloat16 else leaf

        super().write(folder, jax.tree.map(widen, item))


class ListsUnfinished(Folders):
    late = None

    def save(self, step, items):
        self.wait()
        (self.directory / str(step)).mkdir(parents=True)
        self.late = (step, jax.tree.map(lambda leaf: np.array(leaf) if hasattr(leaf, "dtype") else leaf, items))

    def wait(self):
        if self.late:
            step, items = self.late
            shutil.rmtree(self.directory / str(step))
            super().save(step, items)
            self.late = None

    def close(self):
        self.wait()


class ReadsLate(Folders):
    late = None

    def save(self, step, items):
        self.wait()
        self.late = (step, items)

    def wait(self):
        if self.late:
            super().save(*self.late)
            self.late = None

    def close(self):
        self.wait()


class SilentAboutMissing(Folders):
    def read(self, folder, like):
        return super().read(folder, like) if folder.exists() else None


class SortsAsText(Folders):
    def steps(self):
        return sorted(super().steps(), key=str, reverse=True)


def test_a_right_checkpointer():
    assert isinstance(Folders(Path()), protocols.Checkpointer)
    check_checkpointer(Folders)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (LosesBfloat16, r"(?s)params of step 1: the trees differ.*layers/0/w: got float32"),
        (ListsUnfinished, "crash-1: step 1, listed after a crash during a save, does not restore: no item params"),
        (SilentAboutMissing, "restore of a missing absent-item gave"),
        (SortsAsText, r"steps\(\): got \[12, 1\], expected \[1, 12\]"),
    ],
)
def test_a_wrong_checkpointer(bad, message):
    with pytest.raises(AssertionError, match=message):
        check_checkpointer(bad)


def test_a_checkpointer_that_reads_after_save_returned():
    with pytest.raises((AssertionError, RuntimeError), match="deleted"):
        check_checkpointer(ReadsLate)
