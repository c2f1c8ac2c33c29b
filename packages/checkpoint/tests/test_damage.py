"""Any damage to any file is found, named, and never loaded."""

import random
import shutil

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store, digest, read_manifest, verify
from styrax.checkpoint.manifest import encode

ITEMS = {
    "params": {"large": np.arange(4096, dtype=np.float32), "small": np.arange(9), "b": np.ones(5, np.int8)},
    "opt_state": {"mu": np.ones(3000)},
    "run": {"step": 1},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    with CheckpointConfig(pack_below=1000).build(directory) as store:
        store.save(1, ITEMS)
    return directory


def files(directory):
    return sorted(path for path in (directory / "00000001").rglob("*") if path.is_file())


def flip(path, draw):
    data = bytearray(path.read_bytes())
    if data:
        where = draw.randrange(8 * len(data))
        data[where // 8] ^= 1 << where % 8
    path.write_bytes(data)


def truncate(path, draw):
    path.write_bytes(path.read_bytes()[: draw.randrange(max(path.stat().st_size, 1))])


def zero(path, draw):
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))


def delete(path, draw):
    path.unlink()


def restored(store):
    """What was saved, or the text of the error."""
    try:
        return store.restore(1, dict.fromkeys(ITEMS))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("damage", [flip, truncate, zero, delete], ids=lambda f: f.__name__)
def test_every_file(damage, saved, tmp_path, same):
    draw = random.Random(0)
    expected = Store(saved, read_only=True).restore(1, dict.fromkeys(ITEMS))
    refused = 0
    names = [path.relative_to(saved) for path in files(saved)]
    assert len(names) > 11
    for number, name in enumerate(names):
        directory = tmp_path / str(number)
        shutil.copytree(saved, directory)
        before = (directory / name).read_bytes()
        damage(directory / name, draw)
        if (directory / name).exists() and (directory / name).read_bytes() == before:
            continue
        inside = name.relative_to("00000001").as_posix()
        problems = verify(directory / "00000001")
        assert len(problems) == 1
        assert problems[0].startswith(f"{inside}: ")
        store = Store(directory, read_only=True)
        if inside == "MANIFEST.json" and damage is delete:
            assert store.steps() == []
            continue
        found = restored(store)
        if isinstance(found, dict):  # a file that is not needed: every leaf was compared with its digest
            same(found, expected)
        else:
            assert inside in found
            refused += 1
        with pytest.raises(CheckpointError, match=r"all 1 checkpoints in .* damaged"), pytest.warns(match="older"):
            store.latest()
    assert refused > 4


def test_many_flips(saved, tmp_path):
    draw = random.Random(1)
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    for path in files(directory):
        before = path.read_bytes()
        for _ in range(8 if before else 0):
            flip(path, draw)
            assert len(verify(directory / "00000001")) == 1
            path.write_bytes(before)
    assert verify(directory / "00000001") == []


def test_names_the_leaf(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    manifest = read_manifest(tmp_path / "copy/00000001")
    leaf = next(leaf for leaf in manifest.items["params"].leaves if leaf.path == "small")
    packed = tmp_path / "copy/00000001/aux/leaves.bin"
    data = bytearray(packed.read_bytes())
    data[leaf.offset + 3] ^= 16
    packed.write_bytes(data)
    (problem,) = verify(tmp_path / "copy/00000001")
    assert problem.startswith("aux/leaves.bin: digest ") and problem.endswith("(leaf params/small)")
    arrays = max((tmp_path / "copy/00000001/orbax/opt_state").rglob("*"), key=lambda path: path.stat().st_size)
    arrays.write_bytes(b"")
    assert any("0 bytes, expected" in text and "(leaf opt_state/mu)" in text for text in verify(packed.parents[1]))
    # Items that need none of it still load, others do not.
    store = Store(tmp_path / "copy", CheckpointConfig(verify="size"), read_only=True)
    assert store.restore(1, {"run": None}) == {"run": {"step": 1}}
    with pytest.raises(CheckpointError, match=r"leaves\.bin: .*\(leaf params/small\)"):
        store.restore(1, {"params": None})


def test_resume_takes_the_next_older_one_and_says_so(saved, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    with CheckpointConfig(pack_below=1000).build(directory) as store:
        store.save(2, ITEMS)
        store.save(3, ITEMS)
        store.wait()
        assert store.latest() == 3 and store.skipped == {}
        flip(directory / "00000003/aux/leaves.bin", random.Random(2))
        with pytest.warns(UserWarning, match=r"step 3 .* is damaged:\n  aux/leaves.bin"):
            assert store.latest() == 2
        assert list(store.skipped) == [3] and "aux/leaves.bin" in store.skipped[3][0]
        assert store.latest() == 2 and store.latest(verified=False) == 3 and store.steps() == [1, 2, 3]
        # What is damaged counts for nothing, is not deleted, and is replaced when its step is saved again.
        store.save(4, ITEMS)
        store.wait()
        assert store.steps() == [1, 2, 3, 4]
        store.save(3, ITEMS)
        store.wait()
        assert store.skipped == {} and store.verify(3) == [] and store.latest() == 4
    flip(directory / "00000004/MANIFEST.json", random.Random(3))
    with (
        pytest.raises(CheckpointError, match=r"step 4 .* is damaged:\n  MANIFEST.json"),
        CheckpointConfig(on_corrupt="error").build(directory) as store,
    ):
        store.latest()


def test_manifests_that_are_not_ours(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    checkpoint = tmp_path / "copy/00000001"
    moved = checkpoint.rename(checkpoint.with_name("00000005"))
    assert verify(moved) == ["MANIFEST.json: says step 1, the folder 00000005"]
    manifest = read_manifest(moved.rename(checkpoint))
    for change, text in (
        (lambda body: body.replace(b'"version":2', b'"version":9'), "a newer styrax-checkpoint may read it"),
        (lambda body: body.replace(b"aux/leaves.bin", b"../leaves.bin1"[:14]), "files outside of the checkpoint"),
    ):
        body = change(encode(manifest).partition(b',"body":')[2][:-2])
        (checkpoint / "MANIFEST.json").write_bytes(b'{"digest":"%b","body":%b}\n' % (digest.of(body).encode(), body))
        assert text in verify(checkpoint)[0]
