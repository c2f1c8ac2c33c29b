"""Damaged and hostile files: an error for the user or the right data, never anything else, never much memory."""

import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.checkpoint import CheckpointError, formats
from styrax.checkpoint.formats import unpickle

TREE = {
    "layers/0/w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers/0/b": np.arange(4).astype("int16"),
    "flag": np.array([True, False, True]),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.int8),
    "low": np.arange(8, dtype=np.uint8),
}


def load_all(path, **options):
    return {name: array.load() for name, array in formats.read(path, **options).items()}


def outcome(path, **options):
    """Give the arrays, or the text of the error; whatever else is raised fails the test."""
    try:
        return load_all(path, **options)
    except CheckpointError as error:
        return str(error) or "an error without a text"


def header_of(data):
    length = int.from_bytes(data[:8], "little")
    return length, json.loads(data[8 : 8 + length])


def assemble(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """What we write ourselves, as bytes by format."""
    folder = tmp_path_factory.mktemp("ours")
    found = {}
    for name in ("x.safetensors", "x.npz"):
        formats.write(folder / name, TREE)
        found[name] = (folder / name).read_bytes()
    return found


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz"])
def test_no_bit_flip_of_ours_is_silent(ours, tmp_path, name):
    """Every array has a checksum, the header too: what comes back is right, or an error."""
    data, path = ours[name], tmp_path / name
    noise = random.Random(0)
    told = 0
    for _ in range(250):
        damaged = bytearray(data)
        damaged[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        path.write_bytes(damaged)
        got = outcome(path, format="npz" if name == "x.npz" else "safetensors")
        if isinstance(got, str):
            told += 1
        else:
            # A zip archive has fields without a meaning, such as the time.
            assert got.keys() == TREE.keys()
            for key, array in got.items():
                assert (array.dtype, array.shape, array.tobytes()) == (
                    TREE[key].dtype,
                    TREE[key].shape,
                    TREE[key].tobytes(),
                )
    assert told > (240 if name == "x.safetensors" else 150)


@pytest.mark.parametrize("name", ["single.safetensors", "plain.npz", "compressed.npz"])
def test_damage_to_those_of_others_is_an_error_or_passes(golden, tmp_path, name):
    data, path = (golden / name).read_bytes(), tmp_path / name
    noise = random.Random(1)
    for number in range(150):
        damaged = bytearray(data)
        if number % 3 == 0:
            damaged = damaged[: noise.randrange(len(data))]
        elif number % 3 == 1:
            begin = noise.randrange(len(data))
            damaged[begin : begin + 16] = noise.randbytes(16)
        else:
            damaged[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        path.write_bytes(damaged)
        outcome(path, format=name.rpartition(".")[2])


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["safetensors", "npz"]), st.booleans())
def test_random_bytes(tmp_path_factory, data, format, with_length):
    path = tmp_path_factory.mktemp("x") / f"x.{format}"
    path.write_bytes(assemble(data) if with_length else data)
    outcome(path, format=format)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "F4", "X", 3]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62, 2**64, True, 1.0]), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 40) | st.just(2**63), min_size=1, max_size=3),
    }
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=3), entries | json_values, max_size=4), st.binary(max_size=40))
def test_any_header(tmp_path_factory, header, data):
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    path.write_bytes(assemble(header, data))
    got = outcome(path, format="safetensors")
    if not isinstance(got, str):
        assert sum(array.nbytes for array in got.values()) <= 2 * len(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is cut short or no safetensors file"),
        (b"\x08\0\0", "is cut short or no safetensors file"),
        (assemble(b"{}", length=2**63), "the header is to have .* GB, the file has 10 B"),
        (assemble(b"{}", length=3), "is cut short"),
        (assemble(b"[]"), "is no JSON object"),
        (assemble(b"\xff\xff"), "the header cannot be read"),
        (assemble(b"[" * 90_000), "the header cannot be read"),
        (assemble(b'{"a": ' + b"1" * 5000 + b"}"), "the header cannot be read"),
        (assemble(b'{"a": 1, "a": 1}'), "'a'. there more than once"),
        (assemble(b'{"a": NaN}'), "NaN is no JSON"),
        (assemble({"__metadata__": {"a": 1}}), "expected texts by name"),
        (assemble({"a": {}}), "'a': expected dtype, shape and data_offsets"),
        (assemble({"a": {"dtype": "F3", "shape": [], "data_offsets": [0, 4]}}), "'a': dtype 'F3' is none of"),
        (assemble({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "'a': shape .* integers, 0 or more"),
        (assemble({"a": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]}}), "has 70 dimensions"),
        (assemble({"a": {"dtype": "U8", "shape": [0, 2**63], "data_offsets": [0, 0]}}), "larger than any memory"),
        (assemble({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "takes 8 bytes"),
        (assemble({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"1234"), "is cut short: 4 bytes"),
        (assemble({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"1234"), "goes on after the last"),
        (
            assemble(
                {n: {"dtype": "U8", "shape": [3], "data_offsets": [b, b + 3]} for n, b in (("a", 0), ("b", 2))},
                b"12345",
            ),
            "'b': overlaps 'a': begins at 2, expected 3",
        ),
        (
            assemble(
                {n: {"dtype": "U8", "shape": [3], "data_offsets": [b, b + 3]} for n, b in (("a", 0), ("b", 4))},
                b"1234567",
            ),
            "'b': leaves 1 bytes after 'a'",
        ),
        (
            assemble({"a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}, b"1234"),
            "is cut short: 4 bytes after the header, expected 1099511627776",
        ),
        (assemble({"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\1\2"), "other than 0 and 1"),
    ],
)
def test_bad_safetensors_are_told_by_name(tmp_path, data, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=text):
        load_all(path)


def npz(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)


def npy(descr, shape, data=b"", fortran=False):
    handle = io.BytesIO()
    np.lib.format.write_array_header_1_0(handle, {"descr": descr, "fortran_order": fortran, "shape": shape})
    return handle.getvalue() + data


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_bad_npz_are_told_by_name(tmp_path):
    path = tmp_path / "x.npz"
    note = json.dumps({"format": "styrax.npz", "dtypes": {"a": "bfloat16"}})
    for members, text in (
        ([("a.npy", npy("<f4", (2**40,)))], "'a.npy': 0 bytes of data, .* takes 4398046511104"),
        ([("a.npy", npy("<f4", (0, 2**62)))], "larger than any memory"),
        ([("a.npy", npy("<f4", (2,), b"12345678")), ("a.npy", b"")], "'a.npy': there 2 times"),
        ([("a.npy", npy("<f4", (-1,)))], "integers, 0 or more"),
        ([("a.npy", b"hello")], "'a.npy' cannot be read"),
        ([("a.npy", npy("<f4", (1,), b"1234")), ("styrax.json", note)], "float32 cannot hold bfloat16"),
        ([("a.npy", npy("<u2", (1,), b"12")), ("styrax.json", note.replace("bfloat16", "x"))], "no dtype 'x'"),
        ([("styrax.json", note)], "'a': missing, styrax.json names it"),
        ([("styrax.json", "[")], "the archive cannot be read"),
        ([("a.npy", npy("|b1", (2,), b"\1\2"))], "truth values other than 0 and 1"),
    ):
        npz(path, members)
        with pytest.raises(CheckpointError, match=text):
            load_all(path)
    np.savez(path, a=np.array(["x", None], object), b=np.array(["text"]), c=np.ones(2))
    with pytest.raises(CheckpointError, match="has dtype object, which is not a number"):
        formats.read(path)["a"]
    assert set(formats.read(path)) == {"c"} and set(formats.read(path).skipped) == {"a", "b"}


def test_a_zip_that_claims_more_than_deflate_can_do(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy("|u1", (100,), bytes(100)))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\1\2") + 24
    data[at : at + 4] = struct.pack("<I", 2**31)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"'a.npy': claims more than the file has"):
        formats.read(path)


# torch


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_something_is_refused(tmp_path, protocol):
    ran = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": Payload(ran)}, protocol=protocol))
    with pytest.raises(CheckpointError, match=r"the metadata cannot be read, .*Refused.*(system|operation)"):
        formats.read(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.",
        b"\x80\x02cbuiltins\ngetattr\n.",
        b"\x80\x02ctorch\nload\n.",
        b"\x80\x02ctorch.serialization\nload\n.",
        b"\x80\x02ctorch\nfloat32.__class__\n.",
        b"\x80\x04\x8c\x05torch\x8c\x11float32.__class__\x93.",
        b"\x80\x02cpathlib\nPath\n.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n.",
        b"(S'a'\nios\nsystem\n.",
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02\x82\x01.",
        b"Pabc\n.",
        b"\x80\x02X\x01\0\0\0aQ.",
        b"",
    ],
)
def test_hostile_pickles_are_refused(tmp_path, data):
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match="the metadata cannot be read"):
        formats.read(tmp_path)


def test_a_pickle_cannot_change_what_the_next_one_means():
    metadata = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    planted = metadata + b"(N}X\x07\0\0\0plantedK\x01stb."  # BUILD on the class itself
    with pytest.raises(TypeError):
        unpickle.load_metadata(planted)
    fresh = unpickle.load_metadata(metadata + b")\x81.")
    assert fresh.kind == "Metadata" and fresh.state is None and not hasattr(fresh, "planted")


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_damage_to_torch_folders(golden, tmp_path, file):
    source, folder = golden / "torch-two", tmp_path / "x"
    shutil.copytree(source, folder)
    right = {name: (array.dtype, array.shape, array.tobytes()) for name, array in load_all(source).items()}
    data = (source / file).read_bytes()
    noise = random.Random(2)
    for number in range(120):
        damaged = bytearray(data)
        if number % 4 == 0:
            damaged = damaged[: noise.randrange(len(data))]
        else:
            damaged[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        (folder / file).write_bytes(damaged)
        got = outcome(folder)
        if not isinstance(got, str) and file != ".metadata":
            assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in got.items()} == right


def test_a_folder_without_one_of_its_files(golden, tmp_path):
    shutil.copytree(golden / "torch-two", tmp_path / "x")
    (tmp_path / "x/__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"'rows': __1_0.distcp: missing"):
        formats.read(tmp_path / "x")
    (tmp_path / "x/__1_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: 5 bytes, the chunk at .* ends at"):
        formats.read(tmp_path / "x")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's own threads
@pytest.mark.parametrize("source", ["orbax-v1", "orbax-v0-plain", "orbax-v0-standard"])
def test_a_damaged_orbax_folder_is_an_error_or_passes(golden, tmp_path, source):
    files = [path for path in sorted((golden / source).rglob("*")) if path.is_file()]
    for number, path in enumerate(files):
        shutil.copytree(golden / source, tmp_path / str(number))
        (tmp_path / str(number) / path.relative_to(golden / source)).write_bytes(b"")
        outcome(tmp_path / str(number), format="orbax")
