"""Weights in safetensors: what is written and read, and what is refused."""

import contextlib
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.models.hf import open_tensors, write_tensors
from styrax.models.hf.tensors import DTYPES

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# By hand from the format's page, so that a wrong table in the library shows.
CODES = {
    "BOOL": bool,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}


def bits(array):
    """Compare by bytes: not-a-number is equal to itself, -0 is not 0."""
    return array.shape, array.dtype, np.ascontiguousarray(array).tobytes()


def specs(arrays):
    return [(name, array.shape, array.dtype, lambda array=array: array) for name, array in arrays.items()]


def raw(header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def plainly(path):
    """Read a file as the format's page says, without any checks but those numpy makes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    data, found = content[8 + length :], {}
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            found[name] = np.frombuffer(data[begin:end], CODES[one["dtype"]]).reshape(one["shape"])
    return found


@contextlib.contextmanager
def at_most(nbytes):
    """Bound the memory that is taken inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.fixture
def folder(tmp_path):
    """Make a folder of files by name."""

    def make(**files):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return tmp_path

    return lambda files=None, **single: make(**{**(files or {}), **single})


def random_array(shape, dtype, seed=0):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


MIXED = {
    "odd": random_array((3,), np.uint8),
    "embed.weight": random_array((5, 4), ml_dtypes.bfloat16),
    "router.bias": random_array((7,), np.float32),
    "empty": np.empty((0, 2), np.float16),
    "scalar": np.array(2.5, np.float64),
    "mask ✓": np.array([[True, False]]),
    "f8": random_array((2, 2, 2), ml_dtypes.float8_e4m3fn),
}


# ---------------------------------------------------------------------------------------------- round trips


@given(
    st.lists(
        st.tuples(
            hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
            st.sampled_from(list(CODES.values())),
            st.integers(0, 2**32),
        ),
        max_size=6,
    ),
    st.integers(1, 200),
)
@settings(max_examples=40)
def test_what_is_written_is_read(tmp_path_factory, arrays, most):
    path = tmp_path_factory.mktemp("w") / "model"
    arrays = {f"tensor.{n}": random_array(*array) for n, array in enumerate(arrays)}
    write_tensors(path, specs(arrays), shard_bytes=most)
    files = sorted(path.glob("*.safetensors"))
    on_disk = {name: array for file in files for name, array in plainly(file).items()}
    assert {name: bits(array) for name, array in on_disk.items()} == {k: bits(v) for k, v in arrays.items()}
    for file in files:
        sizes = [array.nbytes for array in plainly(file).values()]
        assert len(files) == 1 or len(sizes) == 1 or sum(sizes) <= most
    with open_tensors(path) as tensors:
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            tensor = tensors[name]
            assert bits(tensor.read()) == bits(array)
            assert (tensor.shape, tensor.dtype, tensor.nbytes) == (array.shape, array.dtype, array.nbytes)
        assert tensors.nbytes == sum(array.nbytes for array in arrays.values())


def test_the_table_of_dtypes():
    assert {code: dtype.type for code, dtype in DTYPES.items()} == {c: np.dtype(d).type for c, d in CODES.items()}


def test_the_index_says_where_everything_is(tmp_path):
    write_tensors(tmp_path / "m", specs(MIXED), shard_bytes=30, files={"config.json": b"{}"})
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    shards = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert shards == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 2
    assert index["weight_map"] == {name: shard for shard in shards for name in plainly(tmp_path / "m" / shard)}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in MIXED.values())
    assert (tmp_path / "m" / "config.json").read_bytes() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_header_is_as_other_readers_want_it(tmp_path):
    write_tensors(tmp_path / "m", specs(MIXED))
    content = (tmp_path / "m" / ONE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, one in header.items():
        assert one["data_offsets"][0] % max(1, MIXED[name].dtype.itemsize) == 0
    write_tensors(tmp_path / "m", specs(MIXED), metadata={"a": "b"}, overwrite=True)
    content = (tmp_path / "m" / ONE).read_bytes()
    assert json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"] == {"a": "b"}


def test_a_stock_reader_reads_what_is_written(tmp_path):
    numpy_side = pytest.importorskip("safetensors.numpy")
    plain = {name: array for name, array in MIXED.items() if "float8" not in array.dtype.name}
    write_tensors(tmp_path / "m", specs(plain))
    found = numpy_side.load_file(tmp_path / "m" / ONE)
    assert {name: bits(array) for name, array in found.items()} == {name: bits(a) for name, a in plain.items()}


def test_what_a_stock_writer_writes_is_read(tmp_path):
    numpy_side = pytest.importorskip("safetensors.numpy")
    plain = {name: array for name, array in MIXED.items() if "float8" not in array.dtype.name}
    numpy_side.save_file(plain, tmp_path / ONE, {"format": "pt"})
    with open_tensors(tmp_path) as tensors:
        assert {name: bits(tensors[name].read()) for name in tensors} == {n: bits(a) for n, a in plain.items()}


def test_torch_reads_and_writes_the_short_floats(tmp_path):
    torch = pytest.importorskip("torch")
    torch_side = pytest.importorskip("safetensors.torch")
    short = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    arrays = {code: random_array((3, 5), CODES[code]) for code in short}
    write_tensors(tmp_path / "ours", specs(arrays))
    for code, tensor in torch_side.load_file(tmp_path / "ours" / ONE).items():
        assert tensor.dtype == short[code]
        assert tensor.view(torch.uint8).numpy().tobytes() == arrays[code].tobytes()
    theirs = {c: torch.frombuffer(bytearray(a.tobytes()), dtype=short[c]).reshape(3, 5) for c, a in arrays.items()}
    torch_side.save_file(theirs, tmp_path / ONE)
    with open_tensors(tmp_path) as tensors:
        assert {code: bits(tensors[code].read()) for code in tensors} == {c: bits(a) for c, a in arrays.items()}


# ---------------------------------------------------------------------------------------------- reading


def test_a_part_is_a_view_of_the_file(tmp_path):
    array = random_array((64, 32), np.float32)
    write_tensors(tmp_path / "m", specs({"w": array}))
    with open_tensors(tmp_path / "m") as tensors:
        with at_most(array.nbytes / 2):
            parts = [(index, tensors["w"].read(index)) for index in [np.s_[8:16], np.s_[:, 4:9], (3,), ...]]
        for index, part in parts:
            assert bits(part) == bits(array[index])
            assert not part.flags.writeable and not part.flags.owndata
        assert tensors["w"].read((3, 4)) == array[3, 4]
        tensors["w"].drop()
        assert bits(parts[-1][1]) == bits(array)  # read again from the file
    assert bits(parts[-1][1]) == bits(array)  # views outlive the block
    with pytest.raises(UserError, match="is closed; read within the `with` block"):
        tensors["w"].read()


def test_each_tensor_has_its_own_dtype_and_may_begin_anywhere(folder):
    data = bytes([7]) + np.array([1.5, -2.5], np.float32).tobytes() + np.array([3.0], ml_dtypes.bfloat16).tobytes()
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9), "c": entry("BF16", [1], 9, 11)}
    with open_tensors(folder({ONE: raw(header, data)})) as tensors:
        read = {name: tensor.read() for name, tensor in tensors.items()}
        assert {name: array.tolist() for name, array in read.items()} == {"a": [7], "b": [1.5, -2.5], "c": [3.0]}
        assert [array.dtype.name for array in read.values()] == ["uint8", "float32", "bfloat16"]
        assert all(array.flags.aligned for array in read.values())
        assert tensors["b"].read((slice(1, 2),)).tolist() == [-2.5]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
def test_pages_go_back_to_the_system(tmp_path):
    array = random_array((1024, 1024), np.int32)
    write_tensors(tmp_path / "m", specs({"w": array}))

    def resident():
        kilobytes, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0] and ":" not in line.split()[0]:
                ours = line.endswith(ONE)
            elif ours and line.startswith("Rss:"):
                kilobytes += int(line.split()[1])
        return kilobytes * 1024

    with open_tensors(tmp_path / "m") as tensors:
        view = tensors["w"].read()
        assert (view == array).all()
        assert resident() >= array.nbytes
        tensors["w"].drop()
        assert resident() < 2**17
    del view
    gc.collect()
    assert resident() == 0


def test_a_file_that_is_cut_while_it_is_open(tmp_path):
    write_tensors(tmp_path / "m", specs({"w": random_array((4096,), np.float32)}))
    with open_tensors(tmp_path / "m") as tensors:
        os.truncate(tmp_path / "m" / ONE, 5000)
        with pytest.raises(UserError, match=r"was cut to 5000 bytes since it was opened with \d+"):
            tensors["w"].read()


def test_an_index_may_tell_of_one_file(folder):
    header = {"a": entry("U8", [1], 0, 1)}
    path = folder({ONE: raw(header, b"\7"), INDEX: {"weight_map": {"a": ONE}}})
    with open_tensors(path) as tensors:
        assert tensors["a"].read().tolist() == [7]


# ---------------------------------------------------------------------------------------------- damage


def test_every_cut_is_refused(tmp_path):
    write_tensors(tmp_path / "m", specs(MIXED))
    path = tmp_path / "m" / ONE
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"model\.safetensors"):
            open_tensors(tmp_path / "m")
    path.write_bytes(content[:-20])
    with pytest.raises(
        UserError, match=r"'mask ✓': ends at \d+, the file has \d+ bytes after the header: it is cut sh"
    ):
        open_tensors(tmp_path / "m")
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match="goes on after the last tensor"):
        open_tensors(tmp_path / "m")


def test_a_changed_header_is_refused_or_read_as_it_says(tmp_path):
    """No bit of a header makes another exception, or an array other than the one that the header now describes."""
    write_tensors(tmp_path / "m", specs({k: MIXED[k] for k in ("odd", "embed.weight", "mask ✓")}))
    path = tmp_path / "m" / ONE
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for at in range(end):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            try:
                with open_tensors(tmp_path / "m") as tensors:
                    found = {name: bits(tensor.read()) for name, tensor in tensors.items()}
            except UserError:
                refused += 1
            else:
                assert found == {name: bits(array) for name, array in plainly(path).items()}
    assert refused > 4 * end


@pytest.fixture(scope="module")
def noise_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("noise")


@given(st.binary(max_size=60), st.integers(0, 70), st.booleans())
def test_noise_is_refused(noise_folder, noise, length, framed):
    path = noise_folder
    (path / ONE).write_bytes(raw(noise, b"", length) if framed else noise)
    with contextlib.suppress(UserError), open_tensors(path) as tensors:
        assert not tensors


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a":1', "the header cannot be read"),
        (b"[]", "expected { at its beginning"),
        (b'{"a":' + b"[" * 100_000, "RecursionError"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":NaN}}', "NaN is no JSON"),
        (b'{"a":"\xff"}', "UnicodeDecodeError"),
        (b'{"a":' + b"9" * 5000 + b"}", "the header cannot be read"),
        (b'{"a":{},"a":{}}', "'a' there more than once"),
        ({"__metadata__": {"x": 1}}, "__metadata__: expected texts by name"),
        ({"a": []}, "'a': expected dtype, shape and data_offsets"),
        ({"a": {**entry("U8", [4], 0, 4), "x": 1}}, "'a': expected dtype, shape and data_offsets"),
        ({"a": entry("F4", [8], 0, 4)}, "'a': dtype F4 has less than a byte for an element"),
        ({"a": entry("F7", [4], 0, 4)}, "'a': dtype 'F7' is none of BOOL, U8"),
        ({"a": entry(["U8"], [4], 0, 4)}, "is none of BOOL"),
        ({"a": entry("U8", [-4], 0, 4)}, r"'a': shape \[-4\] is not a list of integers, 0 or more"),
        ({"a": entry("U8", [4.0], 0, 4)}, "is not a list of integers"),
        ({"a": entry("U8", [True], 0, 1)}, "is not a list of integers"),
        ({"a": entry("U8", "4", 0, 4)}, "is not a list of integers"),
        ({"a": entry("U8", [1] * 65, 0, 1)}, "'a': has 65 dimensions"),
        ({"a": entry("U8", [2**40, 2**40, 0], 0, 0)}, "is larger than any memory"),
        ({"a": entry("U8", [2**63], 0, 2**63)}, "is larger than any memory"),
        ({"a": entry("U8", [4], -4, 0)}, "are not two integers, 0 or more"),
        ({"a": entry("U8", [4], 0, 4.0)}, "are not two integers, 0 or more"),
        ({"a": entry("U16", [4], 0, 4)}, r"'a': U16\[4\] takes 8 bytes, its data_offsets are \[0, 4\]"),
        ({"a": entry("U8", [4], 4, 0)}, "takes 4 bytes"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [3], 1, 4)}, "'b': overlaps 'a': begins at 1, expected 2"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [1], 3, 4)}, "'b': leaves 1 bytes after 'a'"),
        ({"a": entry("U8", [3], 1, 4)}, "'a': leaves 1 bytes after the header"),
        ({"a": entry("U8", [5], 0, 5)}, "'a': ends at 5, the file has 4 bytes"),
        ({"a": entry("U8", [3], 0, 3)}, "goes on after the last tensor: 4 bytes after the header, expected 3"),
        ({"a": entry("U8", [2**40], 0, 2**40)}, "'a': ends at 1099511627776, the file has 4 bytes"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_headers_that_lie(folder, header, message):
    with at_most(2**24), pytest.raises(UserError, match=message):
        open_tensors(folder({ONE: raw(header, b"\1\0\0\0")}))


def test_all_problems_are_told_at_once(folder):
    header = {"a": entry("F4", [2], 0, 1), "b": entry("U8", [-1], 0, 1), "c": entry("U8", [4], 0, 4)}
    with pytest.raises(UserError, match=r"(?s)'a': dtype F4.*'b': shape.*Copy it again") as caught:
        open_tensors(folder({ONE: raw(header, b"1234")}))
    assert "'c'" not in str(caught.value)


def test_a_header_longer_than_the_file(folder):
    for length in (5, 2**40, 2**64 - 1):
        with pytest.raises(UserError, match=f"expected a header of {length} bytes, the file has 10"):
            open_tensors(folder({ONE: raw(b"{}", b"", length)}))


def test_a_truth_value_is_0_or_1(folder):
    path = folder({ONE: raw({"a": entry("BOOL", [3], 0, 3)}, b"\1\0\2")})
    with open_tensors(path) as tensors:
        assert tensors["a"].read((slice(0, 2),)).tolist() == [True, False]
        for index in (..., 2, (slice(1, None),)):
            with pytest.raises(UserError, match="'a' has truth values other than 0 and 1"):
                tensors["a"].read(index)


# ---------------------------------------------------------------------------------------------- folders

A, B = (raw({name: entry("U8", [1], 0, 1)}, b"\7") for name in "ab")


@pytest.mark.parametrize(
    ("files", "messages"),
    [
        ({}, ["got neither. Is it the right folder?"]),
        ({"model-00001-of-00002.safetensors": A}, ["got model-00001-of-00002.safetensors without an index"]),
        ({"pytorch_model.bin": b""}, ["pytorch_model.bin", "are pickles", "any code", "save_pretrained"]),
        ({"model.pt": b"", "x.pth": b""}, ["model.pt, x.pth", "are pickles"]),
        ({"model.gguf": b""}, ["got model.gguf, which styrax.models.hf.open_gguf opens"]),
        ({INDEX: b"{"}, [INDEX, "cannot be read (JSONDecodeError"]),
        ({INDEX: b"[" * 100_000}, [INDEX, "cannot be read"]),
        ({INDEX: {}}, ["has no weight_map"]),
        ({INDEX: {"weight_map": {"a": 1}}}, ["has no weight_map with a file for each name"]),
        ({INDEX: {"weight_map": {"a": "../x"}}}, ["'../x': is outside of the folder"]),
        ({INDEX: {"weight_map": {"a": "/etc/passwd"}}}, ["'/etc/passwd': is outside of the folder"]),
        ({INDEX: {"weight_map": {"a": ".."}}}, ["'..': is outside"]),
        ({INDEX: {"weight_map": {"a": ""}}}, [": missing, with 'a'"]),
        ({INDEX: {"weight_map": {"a": "x" * 5000}}}, ["missing, with 'a'"]),
        ({INDEX: {"weight_map": {"a": "\ud800"}}}, ["missing, with 'a'"]),
        (
            {"1": A, INDEX: {"weight_map": {"a": "1", "b": "2", "c": "2", "d": "3"}}},
            ["2: missing, with 'b', 'c'", "3: missing, with 'd'"],
        ),
        (
            {"1": A, "2": B, INDEX: {"weight_map": {"a": "1", "c": "2", "d": "1"}}},
            ["'c': not in 2, the index says it is", "'d': not in 1", "'b': in 2, the index says nothing of it"],
        ),
        ({"1": A, "2": A, INDEX: {"weight_map": {"a": "1", "b": "2"}}}, ["'a': in 2, the index says 1"]),
        ({"1": A, ONE: B, INDEX: {"weight_map": {"a": "1"}}}, ["which tells of 1. They may be of two models"]),
        ({"1": b"", INDEX: {"weight_map": {"a": "1"}}}, ["1: is cut short or no safetensors file"]),
    ],
    ids=lambda value: value[0][-40:] if isinstance(value, list) else "",
)
def test_folders_that_do_not_fit(folder, files, messages):
    path = folder(files)
    with pytest.raises(UserError) as caught:
        open_tensors(path)
    assert all(message in str(caught.value) for message in [str(path), *messages]), str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"is not there, or may not be read, expected a folder with model\.safetensors"):
        open_tensors(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, expected a folder"):
        open_tensors(tmp_path / "file")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_no_file_stays_open_after_an_error(folder):
    path = folder({"1": A, "2": B[:-1], INDEX: {"weight_map": {"a": "1", "b": "2"}}})
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        with pytest.raises(UserError):
            open_tensors(path)
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) <= before


# ---------------------------------------------------------------------------------------------- writing


def test_one_tensor_at_a_time_in_the_given_order(tmp_path):
    made, size = [], 2**20

    def make(name):
        made.append(name)
        return np.full(size, len(made), np.uint8)

    names = list("cabd")
    plan = [(name, (size,), np.uint8, lambda name=name: make(name)) for name in names]
    with at_most(1.5 * size):
        write_tensors(tmp_path / "m", iter(plan), shard_bytes=2 * size)
    assert made == names
    with open_tensors(tmp_path / "m") as tensors:
        assert {name: int(tensors[name].read()[0]) for name in tensors} == {"c": 1, "a": 2, "b": 3, "d": 4}


def test_any_layout_is_written_in_c_order(tmp_path):
    array = np.arange(24, dtype=">f4").reshape(2, 3, 4)
    layouts = {"f": np.asfortranarray(array), "t": array.transpose(2, 0, 1), "s": array[:, ::-1, ::2]}
    write_tensors(tmp_path / "m", specs(layouts))
    for name, found in plainly(tmp_path / "m" / ONE).items():
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, layouts[name])


def test_arrays_of_jax(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.arange(6, dtype="bfloat16").reshape(2, 3)
    write_tensors(tmp_path / "m", [("a", array.shape, array.dtype, lambda: array)])
    with open_tensors(tmp_path / "m") as tensors:
        assert tensors["a"].read().tolist() == [[0, 1, 2], [3, 4, 5]]


def zeros(*shape, dtype=np.float32):
    return lambda: np.zeros(shape, dtype)


def test_all_that_cannot_be_written_is_told_before_anything_is_made(tmp_path):
    def never():
        raise AssertionError("made")

    plan = [
        ("a", (1,), "float32", never),
        ("a", (1,), "float32", never),
        ("b", (1,), ml_dtypes.int4, never),
        ("c", (-1,), "float32", never),
        ("__metadata__", (1,), "float32", never),
        ("\ud800", (1,), "float32", never),
        ("d", (1,), "complex128", never),
    ]
    files = {"x/y": b"", ONE: b"", "..": b"", "other.safetensors": b""}
    with pytest.raises(UserError) as caught:
        write_tensors(tmp_path / "m", plan, files=files, shard_bytes=0)
    for text in [
        "'a': there more than once",
        "'b': no dtype int4 in safetensors",
        "'c': shape [-1]",
        "'__metadata__': expected a text other",
        "is no valid Unicode",
        "'d': no dtype complex128",
        "file 'x/y': expected a file name without folders",
        f"file '{ONE}': is written from the tensors",
        "file '..'",
        "file 'other.safetensors': would be taken for weights",
        "shard_bytes: expected 1 or more, got 0",
    ]:
        assert text in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [zeros(3), zeros(2, dtype=np.float64), zeros(2, 1)])
def test_another_array_than_was_announced(tmp_path, make):
    with pytest.raises(UserError, match=r"'w': expected float32\[2\] as announced, got float(32|64)\["):
        write_tensors(tmp_path / "m", [("v", (9,), "f4", zeros(9)), ("w", (2,), "f4", make)])
    assert not list(tmp_path.iterdir())


def test_what_a_function_raises_comes_through(tmp_path):
    def broken():
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        write_tensors(tmp_path / "m", [("w", (2,), "f4", broken)])
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays_until_it_may_be_replaced(tmp_path):
    path = tmp_path / "m"
    path.mkdir()  # an empty one may be there
    write_tensors(path, [("w", (1,), "f4", lambda: np.ones(1, np.float32))], files={"old.json": b""})
    with pytest.raises(UserError, match=r"is there already.*overwrite=True"):
        write_tensors(path, [("w", (1,), "f4", zeros(1))])

    def broken():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, [("w", (1,), "f4", broken)], overwrite=True)
    with open_tensors(path) as tensors:
        assert tensors["w"].read() == 1
    write_tensors(path, [("w", (1,), "f4", zeros(1))], overwrite=True)
    with open_tensors(path) as tensors:
        assert tensors["w"].read() == 0
    assert [one.name for one in path.iterdir()] == [ONE]
    assert [one.name for one in tmp_path.iterdir()] == ["m"]


def test_stopped_between_the_two_renames_the_old_one_comes_back(tmp_path, monkeypatch):
    path = tmp_path / "m"
    write_tensors(path, [("w", (1,), "f4", lambda: np.ones(1, np.float32))])

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, [("w", (1,), "f4", zeros(1))], overwrite=True)
    with open_tensors(path) as tensors:
        assert tensors["w"].read() == 1
    assert [one.name for one in tmp_path.iterdir()] == ["m"]


def test_only_a_models_folder_is_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(UserError, match="so it is no model's folder, and is not replaced"):
        write_tensors(tmp_path / "home", [], overwrite=True)
    with pytest.raises(UserError, match="is a file, expected the name of a folder"):
        write_tensors(tmp_path / "home" / "thesis.tex", [], overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    write_tensors(tmp_path / "real", [])
    (tmp_path / "link").symlink_to("real")
    write_tensors(tmp_path / "link", [("w", (1,), "f4", zeros(1))], overwrite=True)
    assert (tmp_path / "link").is_symlink()
    with open_tensors(tmp_path / "real") as tensors:
        assert list(tensors) == ["w"]


def test_a_disk_that_takes_no_more(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(
            UserError, match=r"m cannot be written \(File too large, [\d,]+ bytes free\); nothing of it"
        ):
            write_tensors(tmp_path / "m", [("w", (2**16,), "f4", zeros(2**16))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


KILLED = """
import sys
import numpy as np
from styrax.models.hf import write_tensors

root, overwrite = sys.argv[1], sys.argv[2] == "True"
print("ready", flush=True)
for number in range(10**6):
    plan = [(f"w{n}", (20_000,), "f4", lambda n=n: np.full(20_000, number + n, np.float32)) for n in range(6)]
    name = "m" if overwrite else f"m{number}"
    config = {"config.json": str(number).encode()}
    write_tensors(f"{root}/{name}", plan, shard_bytes=150_000, files=config, overwrite=overwrite)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("overwrite", [False, True])
def test_whatever_has_the_name_is_whole_after_a_kill(tmp_path, overwrite):
    def check(path):
        number = int((path / "config.json").read_text())
        with open_tensors(path) as tensors:
            assert list(tensors) == [f"w{n}" for n in range(6)]
            assert all((tensors[f"w{n}"].read() == number + n).all() for n in range(6))

    seen = 0
    for attempt in range(8):
        root = tmp_path / str(attempt)
        worker = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(root), str(overwrite)], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        time.sleep(random.uniform(0, 0.4))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        named = [path for path in root.glob("*") if not path.name.startswith(".")]
        if overwrite and not named:  # the instant between the two renames
            named = list(root.glob(".m-*-old"))
        for path in named:
            check(path)
        seen += len(named)
        if overwrite:  # and the next one writes on
            write_tensors(root / "m", [("w", (1,), "f4", zeros(1))], overwrite=True)
            with open_tensors(root / "m") as tensors:
                assert list(tensors) == ["w"]
    assert seen > 0
