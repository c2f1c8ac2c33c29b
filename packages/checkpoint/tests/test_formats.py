"""Other formats: what their own libraries wrote, round trips of anything, names, shards, refusals, atomic writes."""

import json
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.checkpoint import CheckpointError, formats
from styrax.checkpoint.formats import safetensors
from styrax.checkpoint.formats.base import Array

with zipfile.ZipFile(Path(__file__).with_name("golden") / "formats.zip") as _archive:
    EXPECTED = json.loads(_archive.read("expected.json"))
EXTENSION = [
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
]
OTHERS = ["int4", "uint4", "int2", "uint2", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "complex128"]
PLAIN = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32"]
PLAIN += ["float64", "complex64"]
BITS = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def check_same(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.flags.c_contiguous
    assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("source", EXPECTED)
def test_files_of_the_libraries_that_own_the_formats(golden, source):
    expected = EXPECTED[source]
    separator = {"single.safetensors": "", "sharded": ""}.get(source)
    found = formats.read(golden / source, separator=separator)
    assert {path.replace("%25", "%") for path in found} == {path.replace("%25", "%") for path in expected}
    assert found.nbytes == sum(len(data) // 2 for _, _, data in expected.values())
    for path, (dtype, shape, data) in expected.items():
        array = found[path.replace("w%2E", "w%252E") if separator == "" else path]
        assert (array.dtype.name, list(array.shape)) == (dtype, shape)
        got = array.load()
        assert (got.dtype.name, list(got.shape), got.tobytes().hex()) == (dtype, shape, data)
        got[...] = got  # it belongs to the caller
        if array.mapped is not None:
            assert array.mapped().tobytes().hex() == data


def test_what_is_no_array_is_named(golden):
    assert formats.read(golden / "torch-one").skipped == {"step": "is a Python object in a pickle, which is not read"}
    assert formats.read(golden / "orbax-v0-manager/3").skipped == {"run": "is no tree of arrays"}
    assert formats.read(golden / "orbax-v0-manager/3").named_items == ("params", "opt", "run")
    assert set(formats.read(golden / "orbax-v0-manager/3", items=["opt"])) == {"w", "b"}
    with pytest.raises(CheckpointError, match="'step' is a Python object"):
        formats.read(golden / "torch-one")["step"]
    with pytest.raises(KeyError, match="did you mean 'model/scalar'"):
        formats.read(golden / "torch-one")["model/scala"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("single.safetensors", "safetensors"),
        ("sharded", "safetensors"),
        ("sharded/model.safetensors.index.json", "safetensors"),
        ("plain.npz", "npz"),
        ("orbax-v1", "orbax"),
        ("orbax-v0-plain", "orbax"),
        ("torch-two", "torch"),
    ],
)
def test_detect(golden, path, expected, tmp_path):
    assert formats.detect(golden / path) == expected
    if (golden / path).is_file() and not path.endswith(".json"):
        (tmp_path / "odd").write_bytes((golden / path).read_bytes())
        assert formats.detect(tmp_path / "odd") == expected


def test_detect_says_what_it_looked_for(golden, tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        formats.detect(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"is no checkpoint\. Looked for MANIFEST\.json .styrax.*Orbax"):
        formats.detect(tmp_path)
    with pytest.raises(CheckpointError, match="it holds steps 3: give the folder of one"):
        formats.detect(golden / "orbax-v0-manager")
    with pytest.raises(CheckpointError, match="give its folder"):
        formats.detect(golden / "torch-one/.metadata")
    (tmp_path / "text").write_text("hello world")
    with pytest.raises(CheckpointError, match="neither safetensors nor"):
        formats.detect(tmp_path / "text")
    with pytest.raises(CheckpointError, match="did you mean 'safetensors'"):
        formats.read(golden / "single.safetensors", format="safetensor")


keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["", ".", "..", "a.b", "a/b", "%", "%2F", "%25", "%2E", "/", "é", "__metadata__", "a\nb", '"', "\\"]
)


@st.composite
def trees(draw, dtypes):
    """Tree path -> array of any dtype and shape, bits at random."""
    found = {}
    paths = draw(st.lists(st.lists(keys, min_size=1, max_size=3), max_size=6))
    for path in paths:
        name = "/".join(key.replace("%", "%25").replace("/", "%2F") for key in path)
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.sampled_from([(), (0,), (4,), (8, 3), (0, 5), (2, 0, 3), (1, 1), (3, 4, 2)]))
        if dtype in BITS and not shape:
            shape = (8,)
        count = int(np.prod(shape))
        most = 2 if dtype == "bool" else 2 ** BITS.get(dtype, 8)
        size = 1 if dtype in BITS else dtype_of(dtype).itemsize
        data = np.random.default_rng(draw(st.integers(0, 9))).integers(0, most, count * size, np.uint8)
        array = data.view(dtype_of(dtype)).reshape(shape)
        if draw(st.booleans()):
            array = array.T
        if "\0" not in name:
            found[name] = array
    return found


@settings(max_examples=60, deadline=None)
@given(tree=trees(PLAIN + EXTENSION), separator=st.sampled_from([None, "/", ":"]), shard=st.integers(1, 400))
@pytest.mark.parametrize("suffix", [".safetensors", ""])
def test_safetensors_gives_back_anything(tmp_path_factory, suffix, tree, separator, shard):
    tree = {path: array for path, array in tree.items() if path != "__metadata__"}
    for path, array in list(tree.items()):
        if BITS.get(array.dtype.name, 8) * array.size % 8:
            del tree[path]
    path = tmp_path_factory.mktemp("x") / f"model{suffix}"
    formats.write(path, tree, separator=separator, max_shard=shard)
    got = formats.read(path, separator=separator)
    assert set(got) == set(tree)
    for name, array in tree.items():
        check_same(got[name].load(), array)
        if got[name].mapped:
            check_same(got[name].mapped(), array)


@settings(max_examples=60, deadline=None)
@given(tree=trees(PLAIN + EXTENSION + OTHERS), separator=st.sampled_from([None, ".", ":"]))
def test_npz_gives_back_anything(tmp_path_factory, tree, separator):
    path = tmp_path_factory.mktemp("x") / "model.npz"
    formats.write(path, tree, separator=separator)
    got = formats.read(path, separator=separator)
    assert list(got) == list(tree)
    for name, array in tree.items():
        check_same(got[name].load(), array)
    with np.load(path) as plain:  # numpy reads it too
        for name in plain.files:
            if name != "styrax.json":
                plain[name]


@given(st.lists(keys, min_size=1, max_size=4), st.sampled_from(".:|_ é"))
def test_names_and_paths_are_inverse(path, separator):
    if separator.isalnum():
        with pytest.raises(CheckpointError, match="separator: expected one character"):
            formats.flat_name("a", separator)
        return
    path = "/".join(key.replace("%", "%25").replace("/", "%2F") for key in path)
    assert formats.tree_path(formats.flat_name(path, separator), separator) == path
    assert formats.tree_path(formats.flat_name(path, "/"), "/") == path


@given(st.lists(st.text(max_size=6), unique=True), st.sampled_from(["", ".", "/", "|"]))
def test_any_foreign_name_has_a_path(names, separator):
    for name in names:
        for key in formats.tree_path(name, separator).split("/"):
            assert "%" not in key.replace("%25", "").replace("%2F", "")


def test_two_names_that_are_one_path_are_refused(tmp_path):
    formats.write(tmp_path / "a.npz", {"a/b": np.ones(1), "a.b": np.ones(1)})
    with pytest.raises(CheckpointError, match=r"'a/b' and 'a%2Fb' are both 'a/b'"):
        formats.write(tmp_path / "b.npz", {"a/b": np.ones(1), "a%2Fb": np.ones(1)}, separator="")
    safetensors.write(tmp_path / "d.safetensors", {"a/b": Array.of(1), "a%2Fb": Array.of(2)})
    with pytest.raises(CheckpointError, match=r"'a/b' and 'a%2Fb' are both 'a%2Fb'"):
        formats.read(tmp_path / "d.safetensors")
    assert len(formats.read(tmp_path / "d.safetensors", separator="")) == 2


def test_the_reference_library_reads_what_we_write(tmp_path):
    theirs = pytest.importorskip("safetensors.numpy")
    tree = {"a/w": np.arange(6, dtype=np.float32).reshape(2, 3).T, "n": np.array(3), "e": np.zeros((0, 2), bool)}
    formats.write(tmp_path / "x.safetensors", tree)
    got = theirs.load_file(tmp_path / "x.safetensors")
    assert set(got) == {"a.w", "n", "e"}
    for name, array in got.items():
        check_same(array, tree[name.replace(".", "/")])


def test_what_torch_writes_now(tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    base = torch.randn(6, 10)
    state = {"turned": base.T, "part": base[1:4, ::3], "one": base[2, 3], "spread": base[:1].expand(4, 10)}
    state |= {str(dtype)[6:]: base.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)}
    dcp.save({"model": state, "epoch": 3}, checkpoint_id=tmp_path / "x", no_dist=True)
    found = formats.read(tmp_path / "x")
    assert set(found) == {f"model/{name}" for name in state} and set(found.skipped) == {"epoch"}
    for name, tensor in state.items():
        got = found[f"model/{name}"].load()
        assert got.shape == tuple(tensor.shape) and got.dtype.name == str(tensor.dtype)[6:]
        assert got.tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_header_is_what_others_expect(tmp_path):
    formats.write(tmp_path / "x.safetensors", {"b": np.ones(2, np.int8), "a": np.ones(2)}, metadata={"by": "me"})
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    texts = header.pop("__metadata__")
    assert texts["format"] == "pt" and texts["by"] == "me"
    assert (8 + length) % 8 == 0 and len(data) == 8 + length + 18
    assert header == {
        "a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]},
        "b": {"dtype": "I8", "shape": [2], "data_offsets": [16, 18]},
    }


def test_shards_and_their_index(tmp_path):
    tree = {f"l/{n}": np.full(10, n, np.float32) for n in range(5)}
    formats.write(tmp_path / "model", tree, max_shard=80)
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"]["l.2"] == "model-00002-of-00003.safetensors"
    formats.write(tmp_path / "small", tree)
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["model.safetensors"]
    (tmp_path / "model" / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: missing"):
        formats.read(tmp_path / "model")
    (tmp_path / "model/model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: missing"):
        formats.read(tmp_path / "model")


def test_an_index_of_other_shards_is_refused(tmp_path):
    tree = {f"l/{n}": np.full(10, n, np.float32) for n in range(4)}
    formats.write(tmp_path / "model", tree, max_shard=80)
    index = tmp_path / "model/model.safetensors.index.json"
    record = json.loads(index.read_text())
    for weights, text in (
        ({**record["weight_map"], "l.9": "model-00001-of-00002.safetensors"}, "'l.9': not in model-00001"),
        ({"l.0": "model-00001-of-00002.safetensors"}, "'l.1': in model-00001.*nothing of it"),
        ({"l.0": "../x.safetensors"}, "is outside of its folder"),
        ({"l.0": 3}, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(CheckpointError, match=text):
            formats.read(tmp_path / "model")
    index.write_text('{"weight_map": {"a": "b", "a": "c"}}')
    with pytest.raises(CheckpointError, match="more than once"):
        formats.read(tmp_path / "model")


def test_what_has_no_place_in_a_format_is_told_at_once(tmp_path):
    tree = {
        "a": np.zeros(2, ml_dtypes.int4),
        "b": np.zeros(1, np.complex128),
        "c": np.zeros(3, ml_dtypes.float4_e2m1fn),
    }
    with pytest.raises(CheckpointError) as caught:
        formats.write(tmp_path / "x.safetensors", tree)
    for text in ("'a': safetensors has no dtype for int4", "'b': safetensors has no", "'c': F4[3] does not fill"):
        assert text in str(caught.value)
    with pytest.raises(CheckpointError, match="meaning of its own"):
        formats.write(tmp_path / "x.safetensors", {"__metadata__": np.ones(1)})
    for name in ("x.safetensors", "x.npz"):
        with pytest.raises(CheckpointError, match="no valid Unicode"):
            formats.write(tmp_path / name, {"\ud800": np.ones(1)})
    with pytest.raises(CheckpointError, match="cannot be the name"):
        formats.write(tmp_path / "x.npz", {"a\0b": np.ones(1)})
    with pytest.raises(CheckpointError, match="expected safetensors or npz"):
        formats.write(tmp_path / "x", tree, format="orbax")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "folder"])
def test_writing_is_whole_or_nothing(tmp_path, name):
    good = {"w": np.arange(5.0)}

    def fail():
        raise OSError(28, "No space left on device")

    bad = {**good, "v": Array(shape=(2,), dtype=np.dtype("float32"), load=fail)}
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device, .* free\)"):
        formats.write(tmp_path / name, bad)
    assert list(tmp_path.iterdir()) == []
    formats.write(tmp_path / name, good)
    with pytest.raises(CheckpointError, match="is there already"):
        formats.write(tmp_path / name, good)
    with pytest.raises(CheckpointError, match="what was there is untouched"):
        formats.write(tmp_path / name, bad, overwrite=True)
    check_same(formats.read(tmp_path / name)["w"].load(), good["w"])
    formats.write(tmp_path / name, {"w": np.ones(3)}, overwrite=True)
    check_same(formats.read(tmp_path / name)["w"].load(), np.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_jax_arrays_and_scalars(tmp_path):
    import jax.numpy as jnp

    formats.write(tmp_path / "x.npz", {"a": jnp.ones((2, 3), jnp.bfloat16), "b": 1.5, "c": np.int8(3)})
    got = formats.read(tmp_path / "x.npz")
    check_same(got["a"].load(), np.ones((2, 3), ml_dtypes.bfloat16))
    assert got["b"].load() == 1.5 and got["c"].load().dtype == np.int8


def test_cast():
    values = np.array([1.001, -0.0, np.inf, np.nan, 3e38], np.float32)
    with pytest.raises(CheckpointError, match="w: 1 of 5 numbers are too large for float16"):
        formats.cast("w", Array.of(values), np.dtype("float16")).load()
    got = formats.cast("w", Array.of(values), dtype_of("bfloat16")).load()
    check_same(got, values.astype(ml_dtypes.bfloat16))
    for other in (np.arange(3), np.ones(2, bool), np.ones(2, np.complex64)):
        check_same(formats.cast("w", Array.of(other), dtype_of("bfloat16")).load(), other)
    check_same(
        formats.cast("w", Array.of(values.astype(ml_dtypes.bfloat16)), np.dtype("float64")).load(),
        values.astype(ml_dtypes.bfloat16).astype(np.float64),
    )
    low = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    check_same(formats.cast("w", Array.of(low), dtype_of("float32")).load(), low.astype(np.float32))


def test_orbax_that_lost_a_leaf_is_refused(tmp_path):
    from orbax.checkpoint import v1

    v1.save(str(tmp_path / "x"), {"a": {"b": np.ones(2)}, "a.b": np.zeros(2)})
    with pytest.raises(CheckpointError, match=r"'a/b' and 'a.b' are both 'a.b' to Orbax, which has lost one"):
        formats.read(tmp_path / "x")


def test_stopped_between_the_two_renames_the_old_folder_stays(tmp_path, monkeypatch):
    """Ctrl-C may come at any instant, also in the one when the old is put aside and the new has no name yet."""
    from styrax.checkpoint.formats.files import new_folder

    place = tmp_path / "model"
    place.mkdir()
    (place / "weights").write_text("old")
    rename, calls = Path.rename, []

    def stopped(self, target):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stopped)
    with pytest.raises(KeyboardInterrupt), new_folder(place, overwrite=True) as folder:
        (folder / "weights").write_text("new")
    assert (place / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
