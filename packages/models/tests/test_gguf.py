"""GGUF: what a file says, the values of its blocks, and what is refused."""

import contextlib
import math
import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.models.hf import dequantize, open_gguf, unpermute
from styrax.models.hf.quants import KINDS

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def number(kind, value):
    return struct.pack("<" + FORMATS[kind], value)


def array(kind, *parts, count=None):
    return struct.pack("<IQ", kind, len(parts) if count is None else count) + b"".join(parts)


def entry(key, kind, raw):
    return text(key) + struct.pack("<I", kind) + raw


def record(name, ne, kind, offset, dimensions=None):
    dimensions = len(ne) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", dimensions, *ne, kind, offset)


def gguf(entries=(), tensors=(), alignment=32, version=3, records=None, counts=None, magic=b"GGUF"):
    """Make a file of (name, ne, kind, bytes) as the specification says."""
    at, lines, data = 0, [], b""
    for name, ne, kind, raw in tensors:
        lines.append(record(name, ne, kind, at))
        data += raw + bytes(-len(raw) % alignment)
        at = len(data)
    lines = lines if records is None else records
    counts = counts or (len(lines), len(entries))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(lines)
    return head + (bytes(-len(head) % alignment) + data if lines else b"")


@pytest.fixture
def opened(tmp_path):
    """Write bytes and open them."""
    with contextlib.ExitStack() as stack:

        def open_(content):
            path = tmp_path / "model.gguf"
            path.write_bytes(content)
            return stack.enter_context(open_gguf(path))

        yield open_


# ------------------------------------------------------------------------------- values, one at a time, in float64
# From ggml's C code, in Python's own arithmetic: exact, since no value needs more than 53 bits.


def half(raw, at):
    return struct.unpack_from("<e", raw, at)[0]


def plain(format):
    return lambda b: list(struct.unpack(format, b))


def bf16(b):
    return [struct.unpack("<f", b"\0\0" + b)[0]]


def q4_0(b):
    return [half(b, 0) * ((b[2 + i % 16] >> 4 * (i // 16) & 15) - 8) for i in range(32)]


def q4_1(b):
    return [half(b, 0) * (b[4 + i % 16] >> 4 * (i // 16) & 15) + half(b, 2) for i in range(32)]


def q5_0(b):
    high = int.from_bytes(b[2:6], "little")
    low = [b[6 + i % 16] >> 4 * (i // 16) & 15 for i in range(32)]
    return [half(b, 0) * ((low[i] | (high >> i & 1) << 4) - 16) for i in range(32)]


def q5_1(b):
    high = int.from_bytes(b[4:8], "little")
    low = [b[8 + i % 16] >> 4 * (i // 16) & 15 for i in range(32)]
    return [half(b, 0) * (low[i] | (high >> i & 1) << 4) + half(b, 2) for i in range(32)]


def q8_0(b):
    return [half(b, 0) * struct.unpack_from("<b", b, 2 + i)[0] for i in range(32)]


def scale_and_offset(s, j):
    """ggml's `get_scale_min_k4`."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4


def q4_k(b, fifth=None, at=16):
    out = []
    for j in range(8):
        scale, offset = scale_and_offset(b[4:16], j)
        for i in range(32):
            q = b[at + 32 * (j // 2) + i] >> 4 * (j % 2) & 15
            q += 16 * (fifth[i] >> j & 1) if fifth else 0
            out.append(half(b, 0) * scale * q - half(b, 2) * offset)
    return out


def q5_k(b):
    return q4_k(b, fifth=b[16:48], at=48)


def q6_k(b):
    out = [0.0] * 256
    for n in range(2):
        low, high, scales = b[64 * n :], b[128 + 32 * n :], struct.unpack_from("<8b", b, 192 + 8 * n)
        for i in range(32):
            quarters = [low[i] & 15, low[i + 32] & 15, low[i] >> 4, low[i + 32] >> 4]
            for k in range(4):
                q = (quarters[k] | (high[i] >> 2 * k & 3) << 4) - 32
                out[128 * n + 32 * k + i] = half(b, 208) * scales[i // 16 + 2 * k] * q
    return out


# kind: number, values of a block, its bytes, and its values
PLAIN = {
    "F32": (0, 1, 4, plain("<f")),
    "F16": (1, 1, 2, plain("<e")),
    "BF16": (30, 1, 2, bf16),
    "Q4_0": (2, 32, 18, q4_0),
    "Q4_1": (3, 32, 20, q4_1),
    "Q5_0": (6, 32, 22, q5_0),
    "Q5_1": (7, 32, 24, q5_1),
    "Q8_0": (8, 32, 34, q8_0),
    "Q4_K": (12, 256, 144, q4_k),
    "Q5_K": (13, 256, 176, q5_k),
    "Q6_K": (14, 256, 210, q6_k),
}
# Where the float16 scales stand, to have them finite.
SCALES = {"F16": [0], "Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}


def values(kind, raw):
    _, _, nbytes, decode = PLAIN[kind]
    with np.errstate(invalid="ignore"):
        return np.array([v for at in range(0, len(raw), nbytes) for v in decode(raw[at : at + nbytes])], np.float32)


def blocks(kind, count, seed=0, finite=True):
    """Draw blocks of which all bits vary, with scales of any size."""
    rng = np.random.default_rng(seed)
    raw = bytearray(rng.bytes(count * PLAIN[kind][2]))
    for block in range(count * finite):
        for at in SCALES.get(kind, [0]):
            struct.pack_into("<e", raw, block * PLAIN[kind][2] + at, rng.normal() * 10.0 ** rng.integers(-7, 4))
    return bytes(raw)


def same(got, expected):
    """Equal to the last bit, but for which not-a-number it is."""
    assert got.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(got, expected)
    assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all()


@pytest.mark.parametrize("kind", PLAIN)
@given(st.integers(0, 2**32), st.integers(0, 3), st.booleans())
@settings(max_examples=15)
def test_values_are_exact(kind, seed, count, finite):
    raw = blocks(kind, count, seed, finite)
    same(dequantize(kind, np.frombuffer(raw, np.uint8)), values(kind, raw))


@pytest.mark.parametrize("kind", PLAIN)
def test_many_blocks(kind):
    """More than are decoded in one go, at an odd address."""
    number, size, nbytes, _ = PLAIN[kind]
    assert KINDS[number] == (kind, size, nbytes)
    few = blocks(kind, 3)
    count = 2**18 // size + 5
    raw = np.frombuffer(b"x" + few * -(-count // 3), np.uint8)[1 : 1 + count * nbytes]
    expected = values(kind, few)
    same(dequantize(kind, raw), np.resize(expected, count * size))


@pytest.mark.parametrize("kind", PLAIN)
def test_values_are_those_of_the_gguf_package(kind):
    quants = pytest.importorskip("gguf.quants")
    names = pytest.importorskip("gguf.constants").GGMLQuantizationType
    raw = np.frombuffer(blocks(kind, 40), np.uint8)
    same(dequantize(kind, raw), quants.dequantize(raw, names[kind]))


def test_the_sizes_of_all_kinds_are_those_of_the_gguf_package():
    constants = pytest.importorskip("gguf.constants")
    theirs = {kind.value: (kind.name, *constants.GGML_QUANT_SIZES[kind]) for kind in constants.GGMLQuantizationType}
    assert {number: tuple(kind) for number, kind in KINDS.items()} == {n: theirs[n] for n in KINDS}
    assert [theirs[n][0] for n in theirs.keys() - KINDS.keys()] == ["Q8_1", "Q8_K"]  # never in files


def test_kinds_that_are_not_read():
    with pytest.raises(UserError, match=r"'IQ4_XS' are not read here.*; those that are read: F32, F16.*Q6_K"):
        dequantize("IQ4_XS", np.zeros(136, np.uint8))
    with pytest.raises(UserError, match="Q4_0: expected whole blocks of 18 bytes, got 19 bytes"):
        dequantize("Q4_0", np.zeros(19, np.uint8))


# ---------------------------------------------------------------------------------------------- files

ENTRIES = [
    entry("u8", U8, number(U8, 255)),
    entry("i8", I8, number(I8, -128)),
    entry("u16", U16, number(U16, 2**16 - 1)),
    entry("i16", I16, number(I16, -(2**15))),
    entry("u32", U32, number(U32, 2**32 - 1)),
    entry("i32", I32, number(I32, -(2**31))),
    entry("f32", F32, number(F32, 1e-5)),
    entry("yes", BOOL, b"\1"),
    entry("no", BOOL, b"\0"),
    entry("text", STRING, text("né\0x")),
    entry("u64", U64, number(U64, 2**64 - 1)),
    entry("i64", I64, number(I64, -(2**63))),
    entry("f64", F64, number(F64, 1e-5)),
    entry("tokens", ARRAY, array(STRING, text("a"), text(""), text("▁b"))),
    entry("types", ARRAY, array(I32, number(I32, 1), number(I32, -6))),
    entry("flags", ARRAY, array(BOOL, b"\1", b"\0")),
    entry("nothing", ARRAY, array(F32)),
    entry("nested", ARRAY, array(ARRAY, array(U8, b"\1", b"\2"), array(STRING, text("x")), array(ARRAY))),
]
EXPECTED = {
    "u8": 255,
    "i8": -128,
    "u16": 2**16 - 1,
    "i16": -(2**15),
    "u32": 2**32 - 1,
    "i32": -(2**31),
    "f32": float(np.float32(1e-5)),
    "yes": True,
    "no": False,
    "text": "né\0x",
    "u64": 2**64 - 1,
    "i64": -(2**63),
    "f64": 1e-5,
    "tokens": ["a", "", "▁b"],
    "types": [1, -6],
    "flags": [True, False],
    "nothing": [],
    "nested": [[1, 2], ["x"], []],
}


def lists(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [lists(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_type(opened, version):
    with opened(gguf(ENTRIES, version=version)) as file:
        assert (file.version, len(file)) == (version, 0)
        assert {key: lists(value) for key, value in file.metadata.items()} == EXPECTED
        assert [type(file.metadata[key]) for key in ("u8", "f32", "yes")] == [int, float, bool]
        assert [file.metadata[key].dtype.name for key in ("types", "flags", "nothing")] == ["int32", "bool", "float32"]


@pytest.mark.parametrize("alignment", [1, 8, 32, 256])
def test_tensors(opened, alignment):
    entries = [entry("general.alignment", U32, number(U32, alignment))] if alignment != 32 else []
    shapes = {kind: (3, 2, 2 * size) for kind, (_, size, _, _) in PLAIN.items()}
    raws = {kind: blocks(kind, math.prod(shapes[kind]) // size) for kind, (_, size, _, _) in PLAIN.items()}
    tensors = [(kind, shapes[kind][::-1], PLAIN[kind][0], raw) for kind, raw in raws.items()]
    scalar = ("scalar", (), 0, struct.pack("<f", 2.5))
    empty = ("empty", (4, 0), 0, b"")
    file = opened(gguf(entries, [*tensors, empty, scalar], alignment))
    assert list(file) == [*PLAIN, "empty", "scalar"]
    assert file["empty"].read().shape == (0, 4)
    assert file["scalar"].read() == np.float32(2.5)
    for kind, raw in raws.items():
        tensor, expected = file[kind], values(kind, raw).reshape(shapes[kind])
        assert (tensor.kind, tensor.shape, tensor.dtype) == (kind, shapes[kind], np.float32)
        assert (tensor.stored, tensor.nbytes) == (len(raw), expected.nbytes)
        for index in [
            ...,
            (),
            1,
            -1,
            (2, 1),
            (0, 1, 1),
            np.s_[1:],
            np.s_[1:2, 1],
            np.s_[5:],
            np.s_[::-1],
            np.s_[:, :1],
        ]:
            part = tensor.read(index)
            same(part, np.asarray(expected[index]))
            assert part.flags.writeable
        with pytest.raises(IndexError):
            tensor.read(3)


def test_a_row_of_one_dimension_is_cut_after_it_is_read(opened):
    raw = blocks("Q8_0", 2)
    tensor = opened(gguf([], [("b", (64,), 8, raw)]))["b"]
    same(tensor.read(np.s_[5:40]), values("Q8_0", raw)[5:40])


def test_rows_are_read_alone(opened):
    tensor = opened(gguf([], [("w", (64, 4096), 8, blocks("Q8_0", 2) * 4096)]))["w"]
    with at_most(tensor.nbytes / 10):
        tensor.read(np.s_[100:120])


@contextlib.contextmanager
def at_most(nbytes):
    """Bound the memory that is taken inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def test_a_kind_that_is_not_read_does_not_hide_the_others(opened):
    file = opened(gguf(ENTRIES, [("iq", (256,), 23, bytes(136)), ("w", (1,), 0, struct.pack("<f", 1.5))]))
    assert file["w"].read().tolist() == [1.5]
    with pytest.raises(UserError, match=r"model\.gguf: 'iq': values of kind 'IQ4_XS' are not read here"):
        file["iq"].read()


def test_closed_and_cut(opened, tmp_path):
    file = opened(gguf([], [("w", (4096,), 0, bytes(4096 * 4))]))
    os.truncate(tmp_path / "model.gguf", 5000)
    with pytest.raises(UserError, match="was cut to 5000 bytes since it was opened"):
        file["w"].read()
    file.close()
    with pytest.raises(UserError, match="is closed"):
        file["w"].read()


def test_what_the_gguf_package_writes(tmp_path):
    package = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    arrays = {"a.weight": rng.normal(size=(3, 64)), "b": rng.normal(size=5), "c": rng.normal(size=(2, 2, 32))}
    kinds = {"a.weight": "Q4_1", "b": "F16", "c": "BF16"}
    writer = package.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, 1.5])
    quantized = {}
    for name, array in arrays.items():
        kind = package.GGMLQuantizationType[kinds[name]]
        quantized[name] = package.quants.quantize(array.astype(np.float32), kind)
        writer.add_tensor(name, quantized[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "x.gguf") as file:
        assert file.metadata["llama.block_count"] == 2
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
        assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.5, 1.5]
        assert {name: (tensor.kind, tensor.shape) for name, tensor in file.items()} == {
            name: (kinds[name], array.shape) for name, array in arrays.items()
        }
        for name, raw in quantized.items():
            same(file[name].read(), package.quants.dequantize(raw, package.GGMLQuantizationType[kinds[name]]))


# ---------------------------------------------------------------------------------------------- damage

TENSORS = [
    ("a", (2, 4), 0, blocks("F32", 8)),
    ("b.weight", (32, 1), 8, blocks("Q8_0", 1)),
    ("c", (16,), 30, blocks("BF16", 16)),
]
SMALL = gguf(
    [
        entry("general.alignment", U32, number(U32, 32)),
        entry("n", U8, b"\5"),
        entry("tokens", ARRAY, array(STRING, text("ab"), text("c"))),
        entry("f", ARRAY, array(ARRAY, array(F32, number(F32, 1.0)))),
        entry("ok", BOOL, b"\1"),
    ],
    TENSORS,
)


def plainly(raw):
    """Read as the specification says, without checks: name -> kind, shape, bytes."""
    at = 8

    def take(format):
        nonlocal at
        at += struct.calcsize("<" + format)
        return struct.unpack_from("<" + format, raw, at - struct.calcsize("<" + format))

    def string():
        return take(f"{take('Q')[0]}s")[0]

    def value(kind):
        if kind == STRING:
            return string()
        if kind == ARRAY:
            inner, count = take("I")[0], take("Q")[0]
            return [value(inner) for _ in range(count)]
        return take(FORMATS[kind])[0]

    (tensors,), (entries,) = take("Q"), take("Q")
    metadata = {string(): value(take("I")[0]) for _ in range(entries)}
    records = [(string(), take(f"{take('I')[0]}Q"), take("I")[0], take("Q")[0]) for _ in range(tensors)]
    alignment = metadata.get(b"general.alignment", 32)
    start = -(-at // alignment) * alignment
    found = {}
    for name, ne, kind, offset in records:
        _, size, nbytes = KINDS[kind]
        length = math.prod(ne) // size * nbytes
        found[name.decode()] = KINDS[kind].name, ne[::-1], raw[start + offset : start + offset + length]
    return found


def test_every_cut_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    for size in range(len(SMALL)):
        path.write_bytes(SMALL[:size])
        with pytest.raises(UserError, match=r"x\.gguf"):
            open_gguf(path)
    path.write_bytes(SMALL[:-80])
    with pytest.raises(UserError, match=r"'b.weight': ends at 66, the file has \d+.*\n.*'c': ends at 128, the file"):
        open_gguf(path)
    path.write_bytes(SMALL + b"\0")
    with pytest.raises(UserError, match="goes on after the last tensor: 129 bytes for tensors, expected 128"):
        open_gguf(path)


def test_padding_after_the_last_tensor_may_be_missing(opened):
    whole = gguf([], TENSORS[:2])
    assert opened(whole[:-30])["b.weight"].read().tobytes() == opened(whole)["b.weight"].read().tobytes()


def test_a_changed_header_is_refused_or_read_as_it_says(tmp_path):
    """No bit of a header makes another exception, or values other than those that it now describes."""
    path = tmp_path / "x.gguf"
    path.write_bytes(SMALL)
    end, refused = len(SMALL) - 128, 0
    for at in range(end):
        for bit in range(8):
            changed = bytearray(SMALL)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            try:
                with open_gguf(path) as file:
                    found = {name: (tensor.kind, tensor.shape, tensor.read()) for name, tensor in file.items()}
            except UserError:
                refused += 1
                continue
            expected = plainly(bytes(changed))
            assert found.keys() == expected.keys()
            for name, (kind, shape, raw) in expected.items():
                assert found[name][:2] == (kind, shape)
                same(found[name][2], values(kind, raw).reshape(shape))
    assert refused > 4 * end


@given(st.binary(max_size=80), st.booleans())
def test_noise_is_refused(noise_file, noise, framed):
    noise_file.write_bytes((b"GGUF\3\0\0\0" + bytes([len(noise) % 3]) + bytes(7) if framed else b"") + noise)
    with contextlib.suppress(UserError), open_gguf(noise_file) as file:
        assert not file


@pytest.fixture(scope="module")
def noise_file(tmp_path_factory):
    return tmp_path_factory.mktemp("noise") / "noise.gguf"


HUGE = 2**64 - 1
ONE = bytes(4)


def nested(depth):
    return array(U8) if depth == 1 else array(ARRAY, nested(depth - 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no GGUF file: expected b'GGUF' at its beginning, got b''"),
        (gguf(magic=b"GGML"), "is no GGUF file"),
        (gguf(version=1), "is GGUF version 1, expected 2 or 3"),
        (gguf(version=4), "is GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big endian, which is not read here"),
        (gguf(counts=(HUGE, 0)), f"the number of tensors: is cut short or damaged: {HUGE} parts of 24 bytes"),
        (gguf(counts=(0, HUGE)), f"the number of metadata entries: is cut short or damaged: {HUGE} parts"),
        (gguf([b"\xff" * 8]), "the number of metadata entries: is cut short or damaged: 1 parts of 13 bytes"),
        (gguf([b"\xff" * 8 + bytes(5)]), f"metadata entry 0: is cut short or damaged: expected {HUGE} bytes at 32"),
        (gguf([entry(b"\xff\xfe", U8, b"\1")]), "is not UTF-8"),
        (gguf([entry("k", STRING, text(b"\xc3"))]), r"metadata 'k': b'\\xc3' is not UTF-8"),
        (gguf([entry("k", 13, bytes(8))]), "metadata 'k': type 13 is none of 0 to 12"),
        (gguf([entry("k", BOOL, b"\2")]), "metadata 'k': has a truth value of 2"),
        (gguf([entry("k", ARRAY, array(BOOL, b"\0\7", count=2))]), "has a truth value of 7"),
        (gguf([entry("k", ARRAY, array(77))]), "type 77 of an array's elements"),
        (gguf([entry("k", U8, b"\1")] * 2), "metadata 'k': is there more than once"),
        *(
            (gguf([entry("k", ARRAY, array(kind, bytes(16), count=HUGE))]), f"{HUGE} parts of {size} bytes")
            for kind, size in {U8: 1, I64: 8, STRING: 8, ARRAY: 12}.items()
        ),
        (gguf([entry("k", ARRAY, nested(9))]), "has arrays in arrays, more than 8 deep"),
        (gguf([entry("k", ARRAY, array(ARRAY, count=1) * 50_000)]), "more than 8 deep"),
        (gguf([entry("general.alignment", U32, number(U32, 0))]), "expected a power of two of type 4, got 0"),
        (gguf([entry("general.alignment", U32, number(U32, 48))]), "expected a power of two of type 4, got 48"),
        (gguf([entry("general.alignment", U64, number(U64, 32))]), "got 32 of type 10"),
        (gguf([entry("general.alignment", STRING, text("32"))]), "got '32' of type 8"),
        (gguf(records=[record("w", (1,), 0, 0), record("w", (1,), 0, 32)]), "tensor 'w': is there more than once"),
        (gguf(records=[record("w", (1,), 0, 0, dimensions=5)]), "tensor 'w': has 5 dimensions, at most 4"),
        (gguf(records=[record("w", (1,), 0, 0, dimensions=2**31)]), "has 2147483648 dimensions"),
        (gguf(records=[record("w", (2**40, 2**40, 0), 0, 0)]), "'w': shape .* is larger than any memory"),
        (gguf(records=[record("w", (HUGE,), 0, 0)]), "'w': shape .* is larger than any memory"),
        (gguf(records=[record("w", (2**40,), 0, 0)]), "'w': ends at 4398046511104, the file has 0 bytes for tensors"),
        (gguf(records=[record("w", (1,), 0, HUGE)]), f"'w': leaves {HUGE} bytes after the records"),
        (gguf(records=[record("w", (33,), 8, 0)]), r"'w': Q8_0\[33\]: rows are no multiple of 32 values"),
        (gguf(records=[record("w", (), 8, 0)]), r"'w': Q8_0\[\]: rows are no multiple of 32 values"),
        (gguf(records=[record("w", (16, 2), 8, 0)]), r"'w': Q8_0\[2, 16\]: rows are no multiple"),
        (gguf(records=[record("w", (32,), 4, 0), record("v", (3,), 99, 0)]), r"(?s)'w': kind 4 .*'v': kind 99 is none"),
        (gguf(records=[record("w", (1,), 0, 0), record("v", (1,), 0, 16)]) + ONE, "'v': overlaps 'w': begins at 16"),
        (gguf(records=[record("w", (1,), 0, 0), record("v", (1,), 0, 64)]) + ONE, "'v': leaves 32 bytes after 'w'"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_files_that_lie(opened, content, message):
    with at_most(2**22), pytest.raises(UserError, match=message):
        opened(content)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.gguf: cannot be opened \(No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(UserError, match="cannot be opened"):
        open_gguf(tmp_path)


# ---------------------------------------------------------------------------------------------- order of rows


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_rope_of_neighbours_becomes_rope_of_halves(heads):
    """Scores between two positions are those of llama.cpp, which turns neighbouring rows."""
    rng, width, dim = np.random.default_rng(heads), 6, 8
    query, key = rng.normal(size=(2, heads * dim, width))
    tokens = rng.normal(size=(2, width))
    angles = np.array([[3.0], [11.0]]) * 100.0 ** (-np.arange(dim // 2) / (dim // 2))
    turn = np.exp(1j * angles)[:, None, :]

    def neighbours(weight):
        x = (tokens @ weight.T).reshape(2, heads, dim)
        return (x[..., ::2] + 1j * x[..., 1::2]) * turn

    def halves(weight):
        x = (tokens @ weight.T).reshape(2, heads, dim)
        return (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn

    def score(q, k):
        return np.einsum("hd,hd->h", q[0], k[1].conj()).real

    expected = score(neighbours(query), neighbours(key))
    got = score(halves(unpermute(query, heads)), halves(unpermute(key, heads)))
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    np.testing.assert_array_equal(unpermute(query, heads)[:, 0], unpermute(query[:, 0], heads))  # a bias


def test_rows_that_are_no_pairs():
    for weight, heads in [(np.zeros((6, 2)), 2), (np.zeros(6), 0), (np.zeros(()), 1)]:
        with pytest.raises(UserError, match="expected rows in pairs for each of"):
            unpermute(weight, heads)
