"""Object storage with faults, in memory, and checkpoints to put there; loaded by the tests, see `load`."""

import threading

import numpy as np
import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from styrax.checkpoint import commit
from styrax.checkpoint.manifest import Item, Manifest, step_name
from styrax.checkpoint.remote import Bucket, errors

URL = "unsteady://bucket/run"
CHANGES = ("pipe_file", "put_file", "rm_file")
READS = ("ls", "find", "info", "cat_file")


class Faulty(MemoryFileSystem):
    """Objects in memory; `before` and `after` are called with operation and name, and may raise, wait or change."""

    protocol = "unsteady"
    cachable = False
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    calls = []  # noqa: RUF012
    hidden = {}  # noqa: RUF012  name -> listings that do not show it yet
    lock = threading.Lock()
    one_position = threading.RLock()  # all who open an object in memory share its position
    before = after = None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unsteady://"))

    def _do(self, operation, path, *args, **kwargs):
        name = path.partition("/run")[2].lstrip("/")
        with Faulty.lock:
            Faulty.calls.append((operation, name))
        if Faulty.before is not None:
            Faulty.before(operation, name)
        args = [args[0], path] if operation == "put_file" else [path, *args]
        with Faulty.one_position:
            result = getattr(super(), operation)(*args, **kwargs)
        return result if Faulty.after is None else Faulty.after(operation, name, result)

    def pipe_file(self, path, value, **kwargs):
        return self._do("pipe_file", path, value)

    def put_file(self, lpath, rpath, **kwargs):
        return self._do("put_file", rpath, lpath)

    def rm_file(self, path):
        return self._do("rm_file", path)

    def ls(self, path, detail=True, **kwargs):
        found = self._do("ls", path, detail=True)
        return found if detail else [entry["name"] for entry in found]

    def find(self, path, **kwargs):
        found = self._do("find", path, detail=True)
        for name in list(found):
            if Faulty.hidden.get(name, 0) > 0:
                Faulty.hidden[name] -= 1
                del found[name]
        return found

    def info(self, path, **kwargs):
        return self._do("info", path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._do("cat_file", path, start=start, end=end)

    def cp_file(self, *args, **kwargs):
        raise AssertionError("object storage cannot rename")

    mv = copy = cp_file


register_implementation("unsteady", Faulty, clobber=True)


def wipe():
    """Begin anew."""
    Faulty.store.clear()
    Faulty.hidden.clear()
    Faulty.calls.clear()
    Faulty.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No faults and no objects, and no waiting between attempts."""
    monkeypatch.setattr(errors, "WAIT", 0.0001)
    monkeypatch.setattr(Faulty, "before", None)
    monkeypatch.setattr(Faulty, "after", None)
    wipe()
    yield
    wipe()


@pytest.fixture
def old(tmp_path):
    """A checkpoint."""
    return make(tmp_path / "old", 5, seed=1)


@pytest.fixture
def new(tmp_path):
    """Another one of the same step."""
    return make(tmp_path / "new", 5, seed=2)


@pytest.fixture
def bucket():
    """Where they go."""
    return Bucket(URL, workers=2, attempts=3)


def make(directory, step, seed):
    """Write a checkpoint of bytes that no engine is needed for; its files have the same sizes for every seed."""
    rng, folder = np.random.default_rng(seed), commit.staging(directory, step)
    for name, size in {"orbax/params/d/data": 5000, "orbax/other": 40, "aux/run.json": 9, "aux/empty.json": 0}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(rng.bytes(size))
    items = {"params": Item(kind="tree"), "run": Item(kind="json", file="aux/run.json")}
    manifest = Manifest(
        step=step, created=f"2026-01-01T00:00:{seed:02}Z", items=items, files=commit.seal(folder), writer={}
    )
    commit.publish(folder, manifest)
    return directory / step_name(step)


def contents(folder):
    """Read all files of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(step=None):
    """Look at the objects by themselves, past everything that is tested."""
    found = {name.removeprefix("/bucket/run/"): file.getvalue() for name, file in Faulty.store.items()}
    if step is None:
        return found
    prefix = f"{step_name(step)}/"
    return {name.removeprefix(prefix): data for name, data in found.items() if name.startswith(prefix)}


def changes():
    """List the requests that changed something, in order."""
    return [(operation, name) for operation, name in Faulty.calls if operation in CHANGES]
