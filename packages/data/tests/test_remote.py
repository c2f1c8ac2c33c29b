"""Stores at a URL: the same batches as the local store, through faults, hangs, damage and kills."""

import hashlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data import ByteTokenizer, LMData, Mixture, TokenStore, write_store
from styrax.data.build.writer import StoreWriter
from styrax.data.store import files as store_files
from styrax.data.store import format as store_format
from styrax.data.store import shards as store_shards
from styrax.data.store.copy import copy_store
from styrax.data.store.diff import diff_stores
from styrax.data.store.remote import RemoteStore, open_store
from styrax.data.store.shards import ShardArray

fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
pytest.importorskip("tenacity")

SHARD = 512
TOKENS = "tokens-00000.bin"
BASE = {"seed": 3, "seq_len": 32, "batch_size": 8, "held_out": 0.1}


def texts(count, seed):
    rng = random.Random(seed)
    words = ["the", "cat", "où", "est", "l'été?", "日本語", "0", "12", "def", "f(x):", "return", "x", "🙂"]
    return {f"doc/{i}": " ".join(rng.choices(words, k=rng.randint(1, 60))) for i in range(count)}


class Faulty(MemoryFileSystem):
    """Files in memory, read with faults: `fault(name, start, stop, content)` may raise, wait or change bytes."""

    protocol = "faulty"
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    reads = []  # noqa: RUF012
    fault = None
    one_position = threading.Lock()  # all who open a file in memory share its position

    def cat_file(self, path, start=None, end=None, **kwargs):
        name = path.rpartition("/")[2]
        Faulty.reads.append((name, start))
        with Faulty.one_position:
            content = super().cat_file(path, start=start, end=end, **kwargs)
        return content if Faulty.fault is None else Faulty.fault(name, start, end, content)

    def put_file(self, local, remote, **kwargs):
        Faulty.reads.append((remote.rpartition("/")[2], "put"))
        if Faulty.fault is not None:
            Faulty.fault(remote.rpartition("/")[2], None, None, b"")
        super().put_file(local, remote, **kwargs)


fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(store_files, "WAIT", 0.001)
    monkeypatch.setattr(Faulty, "fault", None)
    Faulty.reads.clear()
    yield
    Faulty.store.clear()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A store of many small shards, with a mask."""
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_format, "SHARD_BYTES", SHARD)
        with StoreWriter(tmp_path_factory.mktemp("stores") / "words", ByteTokenizer(), mask=True) as writer:
            for name, text in texts(60, seed=1).items():
                ids = np.array([*text.encode(), 256])
                writer.add(name, ids, len(ids) - 1, (rng.random(len(ids)) < 0.8).astype(np.uint8))
            return writer.finish(build={}, report={})


@pytest.fixture(scope="module")
def plain(tmp_path_factory, documents):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_format, "SHARD_BYTES", SHARD)
        return write_store(tmp_path_factory.mktemp("stores") / "plain", documents, ByteTokenizer())


@pytest.fixture
def url(words):
    copy_store(words, "faulty://bucket/words")
    Faulty.reads.clear()
    return "faulty://bucket/words"


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def shards_read(name=TOKENS):
    return [start // SHARD for read, start in Faulty.reads if read == name and start != "put"]


def test_a_path_is_a_local_store(words):
    assert type(open_store(words.path)) is type(open_store(str(words.path))) is TokenStore


@pytest.mark.parametrize("protocol", ["memory", "file"])
@pytest.mark.parametrize("pack", ["concat", "best_fit", "none"])
def test_batches_equal_those_of_the_local_store(words, plain, tmp_path, protocol, pack):
    bucket = f"memory://{tmp_path.name}" if protocol == "memory" else f"file://{tmp_path}/bucket"
    remote = {}
    for name, store in (("words", words), ("plain", plain)):
        copy_store(store, f"{bucket}/{name}/")
        remote[name] = open_store(f"{bucket}/{name}", cache_dir=tmp_path / "cache")
    for local, other in (
        (words, remote["words"]),
        (Mixture({"w": words, "p": plain}), Mixture({"w": remote["words"], "p": remote["plain"]})),
        (Mixture({"w": words, "p": plain}), Mixture({"w": words, "p": remote["plain"]})),
    ):
        reference, data = LMData(local, pack=pack, **BASE), LMData(other, pack=pack, **BASE)
        assert data.fingerprint == reference.fingerprint
        for step in (0, 7, 1000):
            same(data.batch(step), reference.batch(step))
            same(data.batch(step, slice(2, 5)), reference.batch(step, slice(2, 5)))
            assert data.provenance(step, 1) == reference.provenance(step, 1)
        for one, two in zip(data.held_out(), reference.held_out(), strict=True):
            same(one, two)
        assert data.held_out_text() == reference.held_out_text()
        with data.loader(prefetch=2) as loader:
            loader.set_state(reference.loader(step=5).get_state())
            same(next(loader), reference.batch(5))


def test_everything_of_a_token_store(words, url, tmp_path):
    store = open_store(url, cache_dir=tmp_path)
    assert isinstance(store, RemoteStore)
    assert isinstance(store, TokenStore)
    assert (len(store), store.num_tokens, store.fingerprint) == (len(words), words.num_tokens, words.fingerprint)
    assert store.ids == words.ids
    assert [store.text(i) for i in range(len(store))] == [words.text(i) for i in range(len(words))]
    np.testing.assert_array_equal(store[-1], words[-1])
    np.testing.assert_array_equal(np.asarray(store.tokens), words.tokens)
    np.testing.assert_array_equal(store.mask[:], words.mask)
    assert diff_stores(words, store)["same"]
    store.verify()
    assert "faulty://bucket/words" in repr(store)
    again = pickle.loads(pickle.dumps(store))
    assert (again.url, again.path) == (store.url, store.path)
    np.testing.assert_array_equal(again[3], words[3])


@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_only_the_shards_that_a_batch_needs_are_fetched(words, url, tmp_path, pack):
    data = LMData(open_store(url, cache_dir=tmp_path), pack=pack, **BASE)
    assert shards_read() == []
    reads, needed = 0, set()
    for step in (0, 3, 0):
        rows = slice(0, 2)
        data.batch(step, rows)
        for row in range(2):
            for span in data.provenance(step, row):
                first = int(words.docs["start"][span.index]) + span.start
                needed |= {place * 2 // SHARD for place in range(max(first - 1, 0), first + span.length)}
        # Padding may be read from the beginning of the store.
        assert needed <= set(shards_read()) <= needed | {0}
        assert len(shards_read()) == len(set(shards_read())) > (reads if step else 0)
        reads = len(shards_read())
    assert reads < len(words.meta["files"][TOKENS]["shards"])
    masked = {place * 2 // SHARD for place in shards_read("mask-00000.bin")}
    assert len(masked) <= len(needed) + 1
    # What was fetched serves the next run, and an open store has all it needs.
    Faulty.reads.clear()
    again = LMData(open_store(url, cache_dir=tmp_path), pack=pack, **BASE)
    same(again.batch(3, slice(0, 2)), LMData(words, pack=pack, **BASE).batch(3, slice(0, 2)))
    assert {name for name, _ in Faulty.reads} == {"meta.json"}


def test_all_can_be_fetched_before_a_run(words, url, tmp_path):
    store, seen = open_store(url, cache_dir=tmp_path), []
    store.fetch(lambda *event: seen.append(event))
    total = words.num_tokens * 3
    assert seen[-1] == ("fetch", total, total)
    assert sorted(shards_read()) == list(range(len(words.meta["files"][TOKENS]["shards"])))
    Faulty.reads.clear()
    same(LMData(store, **BASE).batch(9), LMData(words, **BASE).batch(9))
    store.fetch()
    assert Faulty.reads == []


class At:
    """Faults in one shard of one file, for the first `times` reads."""

    def __init__(self, effect, *, name=TOKENS, shard=2, times=10**9):
        self.effect, self.name, self.start, self.times = effect, name, None if shard is None else shard * SHARD, times
        self.count = 0

    def __call__(self, name, start, stop, content):
        if (name, start) != (self.name, self.start):
            return content
        self.count += 1
        return self.effect(content) if self.count <= self.times else content


def fail(kind=ConnectionResetError):
    def effect(content):
        raise kind("gone away")

    return effect


def flip(content):
    return bytes([content[0] ^ 1]) + content[1:]


def everything(store):
    return store.tokens[:]


def test_errors_that_pass_are_tried_again(words, url, tmp_path):
    faults = [
        At(fail(), times=3),
        At(fail(OSError), times=2, name="docs-00000.npy", shard=0),
        At(lambda content: content[:-1], times=1, shard=4),
        At(flip, times=1, shard=5),
        At(fail(TimeoutError), times=1, name="meta.json", shard=None),
    ]

    def fault(*read):
        for one in faults:
            if one.start == read[1] and one.name == read[0]:
                return one(*read)
        return read[-1]

    Faulty.fault = staticmethod(fault)
    np.testing.assert_array_equal(everything(open_store(url, cache_dir=tmp_path)), words.tokens)
    assert [one.count for one in faults] == [4, 3, 2, 2, 2]


@pytest.mark.parametrize(
    ("effect", "attempts", "message"),
    [
        (
            fail(),
            4,
            "cannot read {}, shard 2 (bytes 1024 to 1535): ConnectionResetError: gone away, 4 times",
        ),
        (fail(RuntimeError), 4, "RuntimeError: gone away, 4 times"),
        (fail(PermissionError), 1, "PermissionError: gone away; check the URL"),
        (fail(FileNotFoundError), 1, "cannot read {}, shard 2"),
        (flip, 2, "{}, shard 2 (bytes 1024 to 1535), is damaged: expected sha256"),
        (lambda content: content[:-1], 4, "OSError: expected 512 bytes, got 511, 4 times"),
        (lambda content: content + b"x", 1, "expected 512 bytes, got 513; the server does not give parts of files"),
    ],
)
def test_errors_that_stay_name_the_shard(words, url, tmp_path, effect, attempts, message):
    store, fault = open_store(url, cache_dir=tmp_path), At(effect)
    Faulty.fault = staticmethod(fault)
    with pytest.raises(UserError) as caught:
        everything(store)
    assert message.format(f"{url}/{TOKENS}") in str(caught.value)
    assert fault.count == attempts
    # Nothing wrong is kept, and the same store goes on when the fault is gone.
    assert not (store.path / f"{TOKENS}.000002").exists()
    Faulty.fault = None
    np.testing.assert_array_equal(everything(store), words.tokens)
    store.verify()


def test_a_loader_that_met_an_error_stays_failed_until_it_is_told_to_go_on(words, url, tmp_path):
    data = LMData(open_store(url, cache_dir=tmp_path), **BASE)
    Faulty.fault = staticmethod(At(fail()))
    with data.loader() as loader:
        with pytest.raises(UserError, match="shard 2"):
            list(zip(range(50), loader))
        with pytest.raises(UserError, match="shard 2"):
            next(loader)
        Faulty.fault = None
        step = loader.get_state()["step"]
        loader.seek(step)
        same(next(loader), LMData(words, **BASE).batch(step))


def test_a_read_that_hangs_is_given_up(words, url, tmp_path):
    release = threading.Event()

    def hang(content):
        release.wait(60)
        return content

    once, ever = At(hang, shard=1, times=1), At(hang)
    store = open_store(url, cache_dir=tmp_path, timeout=0.1)
    try:
        Faulty.fault = staticmethod(once)
        np.testing.assert_array_equal(store.tokens[: SHARD // 2 * 2], words.tokens[:SHARD])
        assert once.count == 2
        Faulty.fault = staticmethod(ever)
        with pytest.raises(UserError) as caught:
            everything(store)
        message = f"reading {url}/{TOKENS}, shard 2 (bytes 1024 to 1535) did not end within 0.1 seconds, 4 times"
        assert message in str(caught.value)
    finally:
        release.set()


def test_a_process_ends_although_a_read_hangs(words, tmp_path, run_python):
    code = f"""
        import time
        import fsspec
        from fsspec.implementations.local import LocalFileSystem
        from styrax.core import UserError
        from styrax.data import LMData
        from styrax.data.store import files
        from styrax.data.store.remote import open_store

        class Hanging(LocalFileSystem):
            protocol = "hanging"
            def cat_file(self, path, start=None, end=None, **kwargs):
                if "tokens" in path:
                    time.sleep(1000)
                return super().cat_file(path, start=start, end=end, **kwargs)

        fsspec.register_implementation("hanging", Hanging)
        files.WAIT = 0.01
        store = open_store("hanging://{words.path}", cache_dir="{tmp_path}", timeout=0.2)
        try:
            LMData(store, seq_len=8, batch_size=2).batch(0)
        except UserError as error:
            print(error)
    """
    assert "did not end within 0.2 seconds" in run_python(code, timeout=60).stdout


def test_what_is_not_there(words, tmp_path):
    with pytest.raises(UserError, match=r"no token store at faulty://bucket/none: it has no meta.json; build one"):
        open_store("faulty://bucket/none", cache_dir=tmp_path)
    fs = Faulty()
    for content, message in [
        (b"{", "faulty://bucket/bad/meta.json is damaged: expected JSON"),
        (b"\xff\xfe", "is damaged"),
        (b"{}", "expected the meta of a styrax-token-store"),
        (b'{"format": "styrax-token-store", "version": 99}', "expected store version 2, got 99"),
        ((words.path / "meta.json").read_bytes().replace(b'"num_tokens": ', b'"num_tokens": 1'), "expected checksum"),
    ]:
        fs.pipe_file("faulty://bucket/bad/meta.json", content)
        with pytest.raises(UserError, match=message) as caught:
            open_store("faulty://bucket/bad", cache_dir=tmp_path)
        assert "upload it (copy_store, overwrite=True)" in str(caught.value) or b"{}" in content
    assert not (tmp_path / "remote").exists()


def test_what_is_missing_is_named_with_its_cure(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="expected a path, or a URL such as s3://"):
        open_store("nonsense://bucket/store", cache_dir=tmp_path)
    with pytest.raises(UserError, match="timeout = 0"):
        open_store("faulty://bucket/store", cache_dir=tmp_path, timeout=0)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gs:// needs another package .*`pip install gcsfs`"):
        open_store("gs://bucket/store", cache_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"needs the package fsspec; install it: `pip install 'styrax-data\[remote\]'`"):
        open_store("faulty://bucket/store", cache_dir=tmp_path)


def test_importing_it_imports_no_fsspec(run_python):
    code = """
        import sys, styrax.data.store.remote, styrax.data.store.copy
        print({'fsspec', 'tenacity', 'jax'} & set(sys.modules))
    """
    assert run_python(code).stdout == "set()\n"


def test_a_store_that_is_replaced_while_it_is_open(words, plain, url, tmp_path):
    old = open_store(url, cache_dir=tmp_path)
    before = old[0].copy()
    copy_store(plain, url, overwrite=True)
    new = open_store(url, cache_dir=tmp_path)
    np.testing.assert_array_equal(new.tokens[:], plain.tokens)
    np.testing.assert_array_equal(old[0], before)
    with pytest.raises(UserError, match="the store was replaced while it was open"):
        everything(old)


def test_threads_fetch_each_shard_once(words, url, tmp_path):
    def slow(name, start, stop, content):
        time.sleep(0.002)
        return content

    Faulty.fault = staticmethod(slow)
    stores = [open_store(url, cache_dir=tmp_path) for _ in range(2)]
    threads = [threading.Thread(target=store.fetch) for store in (*stores, stores[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shards_read()) == len(set(shards_read())) == len(words.meta["files"][TOKENS]["shards"])
    for store in stores:
        np.testing.assert_array_equal(everything(store), words.tokens)


def test_a_fetch_elsewhere_that_does_not_end_holds_nobody_up(words, url, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    store = open_store(url, cache_dir=tmp_path, timeout=0.05)
    locks = [(store.path / f"lock.{number:02d}").open("w") for number in range(store_shards.LOCKS)]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    np.testing.assert_array_equal(store.tokens[:100], words.tokens[:100])
    for lock in locks:
        lock.close()


def test_verify_finds_damage_in_the_cache_and_the_next_run_heals_it(words, url, tmp_path):
    store = open_store(url, cache_dir=tmp_path)
    store.fetch()
    for name in (f"{TOKENS}.000001", "ids-00000.jsonl"):
        file = store.path / name
        content = bytearray(file.read_bytes())
        content[7] ^= 1
        file.unlink()
        file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        store.verify()
    assert f"{TOKENS}.000001, shard 1: expected sha256" in str(caught.value)
    assert "ids-00000.jsonl, shard 0: expected sha256" in str(caught.value)
    healed = open_store(url, cache_dir=tmp_path)
    healed.verify()
    assert healed.ids == words.ids


def test_the_cache_is_no_store_by_itself(url, tmp_path):
    store = open_store(url, cache_dir=tmp_path)
    with pytest.raises(UserError, match="there is no token store"):
        TokenStore(store.path)


def test_a_full_disk_is_an_error_that_says_so(words, url, tmp_path, monkeypatch):
    store = open_store(url, cache_dir=tmp_path)
    monkeypatch.setattr(store_shards.os, "fsync", fail(lambda text: OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"cannot write .*No space left on device \(.* MB free\); free some space"):
        everything(store)
    monkeypatch.undo()
    np.testing.assert_array_equal(everything(store), words.tokens)
    assert not list(store.path.glob(".*.tmp"))


def test_other_stores_make_room_but_none_that_is_open(words, plain, tmp_path):
    pytest.importorskip("fcntl")
    for name, store in (("words", words), ("plain", plain)):
        copy_store(store, f"faulty://bucket/{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_format, "SHARD_BYTES", SHARD)
        third = write_store(tmp_path / "third", {"a": "b" * 300}, ByteTokenizer())
    copy_store(third, "faulty://bucket/third")
    cache = tmp_path / "cache"

    def here():
        stores = (words, plain, third)
        return {store.fingerprint for store in stores if (cache / "remote" / store.meta["checksum"]).exists()}

    held = open_store("faulty://bucket/words", cache_dir=cache)
    open_store("faulty://bucket/plain", cache_dir=cache).fetch()
    open_store("faulty://bucket/third", cache_dir=cache, max_bytes=10**9)
    assert here() == {words.fingerprint, plain.fingerprint, third.fingerprint}
    # The oldest is open, so the other goes, although that is not enough.
    open_store("faulty://bucket/third", cache_dir=cache, max_bytes=0)
    assert here() == {words.fingerprint, third.fingerprint}
    np.testing.assert_array_equal(everything(held), words.tokens)
    del held
    open_store("faulty://bucket/third", cache_dir=cache, max_bytes=0)
    assert here() == {third.fingerprint}
    assert len(list((cache / "remote").iterdir())) == 1


def test_leftovers_of_long_ago_are_removed(url, tmp_path):
    path = open_store(url, cache_dir=tmp_path).path
    old, new = path / ".tokens-00000.bin.000001.ab.tmp", path / ".tokens-00000.bin.000001.cd.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    open_store(url, cache_dir=tmp_path)
    assert new.exists()
    assert not old.exists()


NUMBERS = np.random.default_rng(5).integers(0, 60000, 103).astype("<u2")


@settings(max_examples=100)
@given(
    per=st.sampled_from([1, 2, 7, 50, 103, 200]),
    index=st.one_of(
        st.slices(103),
        st.integers(-103, 102),
        st.lists(st.integers(-103, 102), max_size=20).map(lambda values: np.array(values, np.int64)),
        st.lists(st.integers(0, 102), min_size=4, max_size=4).map(lambda values: np.array(values).reshape(2, 2)),
        st.lists(st.booleans(), min_size=103, max_size=103).map(np.array),
    ),
)
def test_an_array_in_shards_reads_as_numpy_does(tmp_path_factory, per, index):
    folder = tmp_path_factory.getbasetemp() / f"shards-{per}"
    if not folder.exists():
        folder.mkdir()
        for number in range(-(-103 // per)):
            (folder / str(number)).write_bytes(NUMBERS[number * per : (number + 1) * per].tobytes())
    array = ShardArray(lambda number: folder / str(number), 103, NUMBERS.dtype, per * 2)
    expected = NUMBERS[index]
    found = array[index]
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("index", [103, -104, np.array([0, 103]), np.array([-104])])
def test_outside_an_array_in_shards(index, tmp_path):
    (tmp_path / "0").write_bytes(NUMBERS.tobytes())
    with pytest.raises(IndexError, match="of an array of 103"):
        ShardArray(lambda number: tmp_path / str(number), 103, NUMBERS.dtype, 400)[index]


def test_an_upload_sends_the_meta_last(words, tmp_path):
    seen = []
    copy_store(words, "faulty://bucket/words", progress=lambda *event: seen.append(event))
    sent = [name for name, what in Faulty.reads if what == "put"]
    assert sorted(sent) == sorted([*words.meta["files"], "meta.json"])
    assert sent[-1] == "meta.json"
    total = sum(entry["bytes"] for entry in words.meta["files"].values())
    assert seen[-1] == ("upload", total, total)
    for file in words.path.iterdir():
        assert Faulty().cat_file(f"faulty://bucket/words/{file.name}") == file.read_bytes()
    with pytest.raises(UserError, match="faulty://bucket/words already exists; choose another URL, or overwrite it"):
        copy_store(words, "faulty://bucket/words")
    copy_store(words.path, "faulty://bucket/words", overwrite=True)


def test_an_upload_that_breaks_off_is_no_store(words, plain, tmp_path):
    copy_store(plain, "faulty://bucket/s")
    Faulty.fault = staticmethod(At(fail(), name="mask-00000.bin", shard=None))
    with pytest.raises(UserError, match="cannot write faulty://bucket/s: ConnectionResetError: gone away"):
        copy_store(words, "faulty://bucket/s", overwrite=True)
    Faulty.fault = None
    with pytest.raises(UserError, match="there is no token store at faulty://bucket/s"):
        open_store("faulty://bucket/s", cache_dir=tmp_path)
    Faulty.fault = staticmethod(At(fail(), name="mask-00000.bin", shard=None, times=2))
    copy_store(words, "faulty://bucket/s")
    Faulty.fault = None
    open_store("faulty://bucket/s", cache_dir=tmp_path).verify()


def test_a_download_is_the_store(words, url, tmp_path):
    for source in (url, open_store(url, cache_dir=tmp_path / "cache")):
        out = tmp_path / "out"
        copy_store(source, out)
        assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in words.path.iterdir())
        for file in out.iterdir():
            assert file.read_bytes() == (words.path / file.name).read_bytes()
        with pytest.raises(UserError, match="already exists"):
            copy_store(url, out)
        shutil.rmtree(out)
    Faulty.fault = staticmethod(At(flip))
    with pytest.raises(UserError, match=r"shard 2 .*is damaged"):
        copy_store(url, out)
    assert not out.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="is not a token store"):
        copy_store(url, tmp_path / "other", overwrite=True)


def test_what_is_not_copied(words, plain, tmp_path):
    for source, out in (("faulty://a", "memory://b"), (tmp_path, tmp_path / "b")):
        with pytest.raises(UserError, match="expected a URL and a folder on this machine"):
            copy_store(source, out)
    damaged = tmp_path / "damaged"
    shutil.copytree(words.path, damaged)
    file = damaged / TOKENS
    file.write_bytes(flip(file.read_bytes()))
    with pytest.raises(UserError, match="bytes 0 to 511: expected sha256"):
        copy_store(damaged, "faulty://bucket/damaged")
    assert not Faulty().exists("faulty://bucket/damaged/meta.json")


READER = """
import hashlib, sys
from styrax.data import LMData
from styrax.data.store.remote import open_store

store = open_store(sys.argv[1], cache_dir=sys.argv[2])
data = LMData(store, seed=3, seq_len=32, batch_size=8, held_out=0.1)
everything = hashlib.sha256()
for step in range(int(sys.argv[3])):
    for name, array in sorted(data.batch(step).items()):
        everything.update(array.tobytes())
print(everything.hexdigest())
"""


def test_killed_readers_leave_nothing_wrong(tmp_path, python_env):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_format, "SHARD_BYTES", SHARD)
        local = write_store(tmp_path / "local", texts(400, seed=2), ByteTokenizer())
    steps, cache, reference = 100, tmp_path / "cache", LMData(local, **BASE)
    copy_store(local, f"file://{tmp_path}/bucket/s")
    expected = hashlib.sha256()
    for step in range(steps):
        for _, array in sorted(reference.batch(step).items()):
            expected.update(array.tobytes())
    folder = cache / "remote" / local.meta["checksum"]

    def start():
        command = [sys.executable, "-c", textwrap.dedent(READER), f"file://{tmp_path}/bucket/s", str(cache), str(steps)]
        return subprocess.Popen(command, env=python_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def check():
        """Compare every file that has its name with what it stands for."""
        count = 0
        for file in folder.glob("[!.]*-00000.*"):
            name, _, number = file.name.rpartition(".")
            whole = (local.path / (name if number.isdecimal() else file.name)).read_bytes()
            first = int(number) * SHARD if number.isdecimal() else 0
            assert file.read_bytes() == (whole[first : first + SHARD] if number.isdecimal() else whole), file.name
            count += number.isdecimal()
        return count

    rng, found = random.Random(0), [0]
    for kill in range(3):
        process = start()
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            if len(list(folder.glob(f"{TOKENS}.*"))) > found[-1]:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * (0.02 if kill else 0.005))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found.append(check())
    # The first was killed half way at least; a later one may have come to its end.
    assert 0 < found[1] < len(local.meta["files"][TOKENS]["shards"]), found
    # Two at once, on the same cache.
    for process in [start(), start()]:
        out, err = process.communicate(timeout=120)
        assert out.strip() == expected.hexdigest(), err
    check()
    open_store(f"file://{tmp_path}/bucket/s", cache_dir=cache).verify()


def test_object_storage(words, tmp_path):
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {
            "key": "test",
            "secret": "test",
            "client_kwargs": {"endpoint_url": f"http://{host}:{port}"},
            "s3_additional_kwargs": {"ACL": "public-read"},
        }
        s3fs.S3FileSystem(**options).mkdir("tokens")
        with pytest.raises(UserError, match="there is no token store at s3://tokens/words"):
            open_store("s3://tokens/words", cache_dir=tmp_path, storage_options=options)
        with pytest.raises(UserError, match="cannot write s3://nothing/words"):
            copy_store(words, "s3://nothing/words", storage_options=options)
        copy_store(words, "s3://tokens/words", storage_options=options)
        with pytest.raises(UserError, match="already exists"):
            copy_store(words, "s3://tokens/words", storage_options=options)
        store = open_store("s3://tokens/words", cache_dir=tmp_path / "s3", storage_options=options)
        # The same server, by plain HTTP.
        plain = open_store(f"http://{host}:{port}/tokens/words", cache_dir=tmp_path / "http")
        for remote in (store, plain):
            for pack in ("concat", "best_fit"):
                data, reference = LMData(remote, pack=pack, **BASE), LMData(words, pack=pack, **BASE)
                for step in range(3):
                    same(data.batch(step), reference.batch(step))
            remote.verify()
        with pytest.raises(UserError, match="there is no token store at http://"):
            open_store(f"http://{host}:{port}/tokens/none", cache_dir=tmp_path)
        copy_store(store, tmp_path / "down", storage_options=options)
        assert TokenStore(tmp_path / "down").fingerprint == words.fingerprint
        copy_store(words, "s3://tokens/words", storage_options=options, overwrite=True)
    finally:
        server.stop()
