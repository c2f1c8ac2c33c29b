"""The suite for checkpointers accepts a right one and refuses wrong ones, each for its own fault."""

import functools
import hashlib
import pickle
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - numpy learns bfloat16 from it
import numpy as np
import pytest

from styrax.core import protocols, tree
from styrax.core.testing import Outcome, check_checkpointer, outcome_table, report_checkpointer
from styrax.core.testing.checkpointer import CHECKS
from styrax.core.testing.checkpointer_damage import DAMAGE


def is_key(leaf):
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Pickles:
    """A right checkpointer: a file a step, its digest in front, renamed into place when it is whole."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.open = True

    def save(self, step, items):
        if not self.open:
            raise ValueError("closed")
        data = pickle.dumps({name: self.host(item) for name, item in items.items()})
        self.write(step, hashlib.sha256(data).digest() + data)

    def host(self, item):
        return jax.tree_util.tree_map_with_path(self.leaf, item)

    def leaf(self, keys, leaf):
        if isinstance(leaf, (bool, int, float, str, np.ndarray, np.generic)):
            return leaf
        if not isinstance(leaf, jax.Array) or leaf.is_deleted():
            raise ValueError(f"{tree.path_str(keys)}: cannot be saved")
        return (
            Key(np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf)))
            if is_key(leaf)
            else np.array(leaf)
        )

    def write(self, step, data):
        partial = self.directory / f"{step}.partial"
        partial.write_bytes(data)
        partial.rename(self.directory / f"{step}.step")

    def read(self, step):
        if step not in self.steps():
            raise ValueError(f"no step {step}")
        data = (self.directory / f"{step}.step").read_bytes()
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise ValueError("damaged")
        return pickle.loads(data[32:])

    def restore(self, step, like):
        items = self.read(step)
        absent = like.keys() - items.keys()
        if absent:
            raise ValueError(f"no items {absent}")
        return {name: self.fit(items[name], abstract) for name, abstract in like.items()}

    def fit(self, item, like):
        item = jax.tree.map(
            lambda leaf: jax.random.wrap_key_data(leaf.data, impl=leaf.impl) if isinstance(leaf, Key) else leaf, item
        )
        if like is None:
            return item
        asked, found = tree.flatten(like), tree.flatten(item)
        wrong = [path for path in asked.keys() | found.keys() if self.differs(asked.get(path), found.get(path))]
        if wrong:
            raise ValueError(f"do not fit: {wrong}")
        leaves = [
            jax.device_put(leaf, want.sharding) if isinstance(want, jax.ShapeDtypeStruct) else np.asarray(leaf)[()]
            if isinstance(want, np.generic) else leaf
            for leaf, want in zip(found.values(), asked.values())
        ]  # fmt: skip
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def differs(self, asked, found):
        if asked is None or found is None:
            return True
        return any(getattr(asked, name, None) != getattr(found, name, None) for name in ("shape", "dtype"))

    def steps(self):
        return sorted(int(path.stem) for path in self.directory.glob("*.step"))

    def wait(self):
        pass

    def close(self):
        self.open = False


class Key:
    def __init__(self, data, impl):
        self.data, self.impl = data, impl


class LosesBfloat16(Pickles):
    def leaf(self, keys, leaf):
        leaf = super().leaf(keys, leaf)
        return leaf.astype(np.float32) if getattr(leaf, "dtype", None) == jnp.bfloat16 else leaf


class JoinsByDots(Pickles):
    def host(self, item):
        leaves = {tree.path_str(keys).replace("/", "."): leaf for keys, leaf in self.pairs(item)}
        return super().host(jax.tree.unflatten(jax.tree.structure(item), [leaves[name] for name in self.names(item)]))

    def pairs(self, item):
        return jax.tree_util.tree_flatten_with_path(item)[0]

    def names(self, item):
        return [tree.path_str(keys).replace("/", ".") for keys, _ in self.pairs(item)]


class ForgetsTuples(Pickles):
    def fit(self, item, like):
        def lists(node):
            if isinstance(node, dict):
                return {key: lists(child) for key, child in node.items()}
            return [lists(child) for child in node] if isinstance(node, (list, tuple)) else node

        return super().fit(item, like) if like is not None else lists(super().fit(item, None))


class Background(Pickles):
    """Right: what is written in a thread was copied before."""

    thread = None
    error = None
    seconds_if_large = 0

    def write(self, step, data):
        self.wait()

        def work():
            try:
                time.sleep(self.seconds_if_large if len(data) > 2**21 else 0)
                super(Background, self).write(step, data)
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def wait(self):
        if self.thread is not None:
            self.thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def close(self):
        super().close()
        self.wait()


class Swallows(Background):
    def wait(self):
        if self.thread is not None:
            self.thread.join()


class ReadsLate(Pickles):
    late = None

    def save(self, step, items):
        self.wait()
        self.late = (step, items)

    def wait(self):
        if self.late:
            late, self.late = self.late, None
            super().save(*late)

    def close(self):
        self.wait()
        super().close()


class ListsUnfinished(Pickles):
    """What a crash leaves of a save is listed."""

    late = None

    def write(self, step, data):
        self.wait()
        self.late = (step, data)
        (self.directory / f"{step}.step").write_bytes(b"begun")

    def wait(self):
        late, self.late = self.late, None
        if late:
            super().write(*late)

    def close(self):
        self.wait()
        super().close()


class DeletesFirst(ListsUnfinished):
    """While a step is saved again, neither is there."""

    def write(self, step, data):
        super().write(step, data)
        (self.directory / f"{step}.step").unlink()


class DropsWhileBusy(Background):
    seconds_if_large = 0.2

    def write(self, step, data):
        if self.thread is None or not self.thread.is_alive():
            super().write(step, data)


class OnlyForward(Pickles):
    def save(self, step, items):
        if step > max(self.steps(), default=-1):
            super().save(step, items)


class Remembers(Pickles):
    def __init__(self, directory):
        super().__init__(directory)
        self.known = super().steps()

    def write(self, step, data):
        self.known = sorted({*self.known, step})
        super().write(step, data)

    def steps(self):
        return self.known


class SortsAsText(Pickles):
    def steps(self):
        return sorted(super().steps(), key=str)


class Unchecked(Pickles):
    def read(self, step):
        if step not in self.steps():
            raise ValueError(f"no step {step}")
        return pickle.loads((self.directory / f"{step}.step").read_bytes()[32:])


class Casts(Pickles):
    def differs(self, asked, found):
        return asked is None or found is None


class FillsIn(Pickles):
    def fit(self, item, like):
        if isinstance(like, dict) and like.get("block", {}).get("another_leaf") is not None:
            return {"block": {**item["block"], "another_leaf": like["block"]["another_leaf"]}}
        return super().fit(item, like)


class AllOrNothing(Pickles):
    def restore(self, step, like):
        if self.read(step).keys() != like.keys():
            raise ValueError("all items must be asked for")
        return super().restore(step, like)


class NotTwice(Pickles):
    def close(self):
        assert self.open
        super().close()


class Nothing(Pickles):
    """Loses whatever it is given."""

    def save(self, step, items):
        pass

    def restore(self, step, like):
        return {}

    def steps(self):
        return [0]


class Empties(Pickles):
    """A file that is damaged or missing counts as one of zeros."""

    def read(self, step):
        try:
            return super().read(step)
        except ValueError:
            return {"params": {"w": np.zeros((40, 50), np.float32), "b": np.zeros(300, np.int8)}, "run": {}}


@functools.cache
def short(kind):
    """The checks in which a checkpointer falls short, and why."""
    return {outcome.name: outcome.detail for outcome in report_checkpointer(kind) if not outcome.passed}


@pytest.mark.parametrize("kind", [Pickles, Background])
def test_right_ones(kind, tmp_path):
    assert isinstance(kind(tmp_path), protocols.Checkpointer)
    check_checkpointer(kind)


CRASHES = {"a crash during a save", "a crash while a step is saved again"}
REFUSALS = {"another shape is refused", "a transposed shape is refused", "another dtype is refused"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            LosesBfloat16,
            {"dtype bfloat16", "every bit of a float: NaNs, -0.0, subnormals", "an array without elements"},
        ),
        (JoinsByDots, {"a.b beside a: {b}", "a.0 beside a: [...]"}),
        (ForgetsTuples, {"lists and tuples", "None and empty containers"}),
        (Swallows, {"a failed save is raised"}),
        (ReadsLate, {f"arrays {what} after save" for what in ("changed", "deleted", "donated")}),
        (ListsUnfinished, {"a failed save is not listed", *CRASHES}),
        (DeletesFirst, {"a crash while a step is saved again"}),
        (DropsWhileBusy, {"a save while another runs is not dropped"}),
        (OnlyForward, {"a save of a lower step is not dropped", "a step saved again is the old or the new one"}),
        (Remembers, {"steps are read from the disk", "a failed save is not listed"}),
        (SortsAsText, {"steps in order, there again when reopened"}),
        (Unchecked, {"a flipped bit is found", "a zeroed page is found"}),
        (Empties, {*DAMAGE, "a missing step is refused"}),
        (
            Casts,
            {*REFUSALS, "a random key is not given as numbers", "a random key of another implementation is refused"},
        ),
        (FillsIn, {"a missing leaf is refused"}),
        (NotTwice, {"close may be called twice"}),
    ],
)
def test_wrong_ones(kind, names):
    assert short(kind).keys() == names


def test_names_every_breach_at_once():
    with pytest.raises(AssertionError) as caught:
        check_checkpointer(Remembers)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"2 of {len(CHECKS)} checks failed:"
    assert "steps() after copying a checkpoint into the folder: got [], expected [1]" in lines[1]
    assert "steps() after a save of step 2 that could not be written: got [1, 2], expected [1]" in lines[2]


def test_every_check_can_fail():
    assert CHECKS.keys() - short(Nothing).keys() <= short(NotTwice).keys()


def test_reports():
    (outcome,) = report_checkpointer(Remembers, ["steps are read from the disk"])
    assert not outcome.passed
    assert str(outcome).startswith("FELL SHORT  steps are read from the disk: steps() after copying")
    (other,) = report_checkpointer(Pickles, ["steps are read from the disk"])
    assert other == Outcome(name="steps are read from the disk", passed=True)
    lines = outcome_table(right=[other], wrong=[outcome]).splitlines()
    assert lines[1].split("  ") == ["steps are read from the disk", "yes", "", "NO"]
