"""Caches that cannot be used, and data that were found from another folder."""

import warnings
from types import SimpleNamespace

import jax
import pytest

from styrax.core import UsageError, UserError
from styrax.train.interrupts import UNBEGUN, Interrupts
from styrax.train.machine import caching, use_compilation_cache
from styrax.train.rundir import RunDir
from styrax.train.session import build_data


@pytest.fixture
def jax_config():
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("variable", ["STYRAX_CACHE", "JAX_COMPILATION_CACHE_DIR"])
def test_a_compilation_cache_that_cannot_be_written_is_said_once(monkeypatch, tmp_path, jax_config, variable):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    with pytest.warns(match=rf"cannot write .*file/cache.*Set {variable} to a folder that can be written"):
        use_compilation_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax.jit(lambda x: x + 3)(1) == 4


def test_a_compilation_cache_that_can_only_be_read_is_read(monkeypatch, tmp_path, jax_config):
    def touch(path, *args, **kwargs):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("STYRAX_CACHE", str(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.touch", touch)
            use_compilation_cache()
        warnings.warn("Error writing persistent compilation cache entry for 'jit_f': OSError", stacklevel=1)
    assert len(caught) == 1
    assert jax_config.jax_compilation_cache_dir.startswith(str(tmp_path))


@pytest.mark.parametrize("place", ["", "data/key", ".."])
def test_a_cache_that_cannot_be_written_names_its_variable(monkeypatch, tmp_path, place):
    root = tmp_path / "x" / "cache"
    monkeypatch.setenv("STYRAX_CACHE", str(root))
    where = root.parent if place == ".." else root / place
    said = rf"cannot write the cache {root} \(STYRAX_CACHE={root}\).*Set STYRAX_CACHE"
    with pytest.raises(UserError, match=said), caching():
        raise OSError(2, "No such file or directory", str(where))
    monkeypatch.delenv("STYRAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    with pytest.raises(UserError, match=r"\(XDG_CACHE_HOME=.*Set STYRAX_CACHE"), caching():
        raise OSError(2, "No such file or directory", str(tmp_path / "x" / "styrax" / "data"))
    with pytest.raises(OSError, match="mine"), caching():
        raise OSError(2, "No such file or directory", str(tmp_path / "mine"))


class Data:
    def __init__(self, error=None):
        self.error, self.told = error, []

    def build(self, *, seed, progress):
        progress("read", 1, 2)
        if self.error is not None:
            raise self.error
        return "data"


def built(data, folder, interrupts=None):
    resolved = SimpleNamespace(sections={"data": data, "train": SimpleNamespace(seed=0)})
    return build_data(resolved, folder, lambda *args: data.told.append(args), interrupts or Interrupts())


def test_data_that_are_not_found_from_another_folder(tmp_path, monkeypatch):
    folder = RunDir(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    missing = UsageError("txt: does not exist")
    with pytest.raises(UsageError, match=r"^txt: does not exist$"):
        built(Data(missing), folder)
    folder.create()
    folder.begin("")
    with pytest.raises(UsageError, match=r"^txt: does not exist$"):
        built(Data(missing), folder)
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    with pytest.raises(UsageError, match=rf"(?s)^txt.*started in {tmp_path}, and relative paths .*Start it from there"):
        built(Data(missing), folder)


def test_building_data_stops_between_two_pieces(tmp_path):
    interrupts = Interrupts()
    data = Data()
    assert built(data, RunDir(tmp_path), interrupts) == "data"
    assert data.told == [("read", 1, 2)]
    interrupts.received = "SIGTERM"
    with pytest.raises(KeyboardInterrupt, match=UNBEGUN):
        built(data, RunDir(tmp_path), interrupts)
    assert len(data.told) == 1
