import csv
import gzip
import io
import json
import re
import sys
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data import build_store, find_documents
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers import Meter, cut_file, kind_of, read_piece
from styrax.data.build.records import ReadSettings

TEXTS = ["plain", "", 'où, \'l"été"?\r\nline\rline\n', "日本語 🙂\t\x0b\u2028|", " " * 300, '""",;\n""']
PLAIN = ReadSettings()


def document(file):
    (found,) = find_documents([file])
    return found


def read(file, settings=PLAIN, size=1 << 30):
    """Read a file, cut into pieces of a size."""
    pieces = list(cut_file(document(file), settings, size))
    return [record for piece in pieces for record in read_piece(piece, settings, Meter())], pieces


def pairs(records):
    bad = [record for record in records if isinstance(record, Refused)]
    assert bad == []
    return [(record.id, record.text) for record in records]


def numbered(name, texts):
    return [(f"{name}@{number}", text) for number, text in enumerate(texts)]


def refusals(records):
    return [(record.id, record.reason) for record in records if isinstance(record, Refused)]


def as_jsonl(texts, **other):
    return "".join(json.dumps({"text": text, **other}, ensure_ascii=False) + "\n" for text in texts)


def as_csv(texts, delimiter=","):
    out = io.StringIO(newline="")
    rows = csv.writer(out, delimiter=delimiter)
    rows.writerows([["n", "text"], *([i, text] for i, text in enumerate(texts))])
    return out.getvalue()


def compress(content, ending):
    if ending == ".gz":
        # Two members, as `cat a.gz b.gz` makes them.
        half = len(content) // 2
        return gzip.compress(content[:half]) + gzip.compress(content[half:])
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    pack = zstandard.ZstdCompressor(write_checksum=True).compress
    return pack(content[:half]) + pack(content[half:])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", ("text", None)),
        ("a", ("text", None)),
        ("a.py", ("text", None)),
        ("v1.2.JSONL", ("jsonl", None)),
        ("a.ndjson.gz", ("jsonl", "gz")),
        ("a.csv.zst", ("csv", "zst")),
        ("a.tsv", ("csv", None)),
        ("a.txt.gz", ("text", "gz")),
        ("a.gz", ("text", "gz")),
        ("a.parquet", ("parquet", None)),
        ("csv", ("text", None)),
    ],
)
def test_the_name_says_what_a_file_holds(name, kind):
    found = kind_of(Path(name))
    assert (found.format, found.compression) == kind
    assert found.delimiter == ("\t" if ".tsv" in name else ",")


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("form", [".jsonl", ".csv", ".tsv", ".txt"])
def test_every_format_gives_its_texts(tmp_path, form, ending):
    content = {".jsonl": as_jsonl(TEXTS), ".csv": as_csv(TEXTS), ".tsv": as_csv(TEXTS, "\t"), ".txt": TEXTS[3]}[form]
    file = tmp_path / f"x{form}{ending}"
    file.write_bytes(compress(content.encode(), ending) if ending else content.encode())
    expected = [(file.name, TEXTS[3])] if form == ".txt" else numbered(file.name, TEXTS)
    assert pairs(read(file)[0]) == expected


def test_parquet_gives_its_texts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "x.parquet"
    texts = TEXTS * 50
    table = pyarrow.table({"n": list(range(len(texts))), "text": texts, "name": [f"id {i}" for i in range(len(texts))]})
    parquet.write_table(table, file, row_group_size=7)
    assert parquet.read_table(file)["text"].to_pylist() == texts
    records, pieces = read(file)
    assert pairs(records) == numbered(file.name, texts)
    assert len(pieces) == 1
    # The same from any row groups, and with ids of its own.
    for size in (1, 1000):
        records, pieces = read(file, ReadSettings(id="name"), size)
        assert len(pieces) > 10
        assert pairs(records) == [(f"id {i}", text) for i, text in enumerate(texts)]
    # Large and dictionary strings are texts too; the other columns are there for filters.
    kinds = (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))
    for kind in kinds:
        parquet.write_table(table.set_column(1, "text", table["text"].cast(kind)), file)
        records, _ = read(file, ReadSettings(all_fields=True))
        assert pairs(records) == numbered(file.name, texts)
        assert [record.fields["n"] for record in records] == list(range(len(texts)))


def test_parquet_that_cannot_be_used(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"Text": ["a"], "n": [1]}), file)
    with pytest.raises(UserError, match=r"no column 'text' \(did you mean 'Text'\?\); its columns: Text, n; name"):
        read(file)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), file)
    assert refusals(read(file)[0]) == [("x.parquet@1", "text is no string")]
    parquet.write_table(pyarrow.table({"text": pyarrow.array([b"\xff"], pyarrow.binary())}), file)
    assert refusals(read(file)[0]) == [("x.parquet@0", "text is no string")]
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"x\.parquet is damaged or cut short"):
        read(file)
    (tmp_path / "y.parquet.gz").write_bytes(b"")
    with pytest.raises(UserError, match="parquet brings its own compression"):
        read(tmp_path / "y.parquet.gz")


@pytest.mark.parametrize(
    ("module", "name", "extra"), [("pyarrow", "x.parquet", "parquet"), ("zstandard", "x.jsonl.zst", "zstd")]
)
def test_a_package_that_is_missing(tmp_path, monkeypatch, module, name, extra):
    if extra == "zstd" and sys.version_info >= (3, 14):
        pytest.skip("in the standard library")
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=rf'needs {module}: pip install "styrax-data\[{extra}\]"'):
        build_store([tmp_path / name], tmp_path / "s", tokenizer="byte")


values = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)


@given(st.lists(values, max_size=12), st.integers(1, 40), st.booleans())
def test_json_lines_cut_anywhere(texts, size, spaced):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.jsonl")
        lines = as_jsonl(texts, n=1).replace("\n", "\n\n") if spaced else as_jsonl(texts, n=1)
        file.write_text(lines, encoding="utf-8", newline="")
        records, pieces = read(file, size=size)
        step = 2 if spaced else 1
        assert pairs(records) == [(f"x.jsonl@{number * step}", text) for number, text in enumerate(texts)]
        assert pieces[0].start == 0
        assert pieces[-1].stop == file.stat().st_size
        assert all(one.stop == other.start for one, other in pairwise(pieces))
        assert all(size <= piece.size for piece in pieces[:-1])


@given(
    st.lists(st.tuples(values, values), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_tables_cut_anywhere(rows, size, end):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.csv")
        with file.open("w", encoding="utf-8-sig", newline="") as handle:
            csv.writer(handle, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([("text", "name"), *rows])
        with file.open(encoding="utf-8-sig", newline="") as handle:
            expected = [row["text"] for row in csv.DictReader(handle)]
        records, pieces = read(file, size=size)
        assert pairs(records) == numbered("x.csv", expected)
        assert expected == [text for text, _ in rows]
        assert all(one.stop == other.start for one, other in pairwise(pieces))


@given(st.text(alphabet="abé-\n", max_size=60), st.integers(1, 20), st.sampled_from(["\n", "--", "aa"]))
def test_texts_cut_anywhere(text, size, separator):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.txt")
        file.write_bytes(text.encode())
        *whole, rest = text.split(separator)
        expected = [part + separator for part in whole] + ([rest] if rest else [])
        records, _ = read(file, ReadSettings(split_on=separator), size)
        assert pairs(records) == [(f"x.txt#{number}", piece) for number, piece in enumerate(expected)]


BAD_LINES = {
    b"{'text': 1}": "not JSON",
    b'{"text": "cut': "not JSON",
    b"[" * 100_000: "not JSON",
    b'["text"]': "not a record",
    b'{"txt": "a"}': "no text",
    b'{"text": null}': "text is no string",
    b'{"text": ["a"]}': "text is no string",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "\\ud800"}': "not Unicode",
}


def test_lines_that_are_no_records(tmp_path):
    file = tmp_path / "x.jsonl"
    good = b'{"text": "good"}\n'
    file.write_bytes(good + b"\n".join(BAD_LINES) + b"\n" + good)
    records, _ = read(file)
    assert refusals(records) == [(f"x.jsonl@{i}", reason) for i, reason in enumerate(BAD_LINES.values(), 1)]
    assert [record.text for record in records if not isinstance(record, Refused)] == ["good", "good"]
    assert str(records[1].error()).startswith(f"{file}, line 2, is not JSON: ")
    assert "(did you mean 'txt'?); its fields: txt; name the field" in str(records[5].error())
    assert all(len(record.line()) < 2000 for record in records if isinstance(record, Refused))
    replaced, _ = read(file, ReadSettings(errors="replace"))
    assert "\ufffd" in [record.text for record in replaced if not isinstance(record, Refused)]


def test_rows_that_are_no_records(tmp_path):
    file = tmp_path / "x.csv"
    rows = [
        b"name,text",
        b"a,good",
        b"b",
        b"c,one,two",
        b'd,"quo"ted',
        b"",
        b"e,\xff",
        b"f,good",
        b'g,"open',
        b"h,lost",
    ]
    file.write_bytes(b"\n".join(rows))
    records, _ = read(file)
    assert refusals(records) == [
        ("x.csv@1", "wrong number of columns"),
        ("x.csv@2", "wrong number of columns"),
        ("x.csv@3", "not CSV"),
        ("x.csv@4", "not UTF-8"),
        ("x.csv@6", "not CSV"),
    ]
    assert [record.text for record in records if not isinstance(record, Refused)] == ["good", "good"]
    # The same when it is cut into rows.
    assert [record.id for record in read(file, size=1)[0]] == [record.id for record in records]
    replaced, _ = read(file, ReadSettings(errors="replace"))
    assert "\ufffd" in [record.text for record in replaced if not isinstance(record, Refused)]
    with pytest.raises(UserError, match=r"no column 'txt' \(did you mean 'text'\?\) and no column 'nam'"):
        read(file, ReadSettings(text="txt", id="nam"))


def test_a_column_may_hold_a_whole_book(tmp_path):
    limit = csv.field_size_limit()
    (tmp_path / "x.csv").write_text(as_csv(["x" * 300_000]))
    assert [len(text) for _, text in pairs(read(tmp_path / "x.csv")[0])] == [300_000]
    assert csv.field_size_limit() == limit


def test_ids_of_its_own(tmp_path):
    file = tmp_path / "x.jsonl"
    ids = ["a", 7, "\ud800", None, True, "", 1.5, [1]]
    file.write_text("".join(json.dumps({"text": "t", "id": name}) + "\n" for name in ids))
    records, _ = read(file, ReadSettings(id="id"))
    assert [record.id for record in records[:3]] == ["a", "7", "\\ud800"]
    assert refusals(records) == [(f"x.jsonl@{i}", "no id") for i in range(3, 8)]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("form", [".txt", ".jsonl", ".csv"])
def test_compressed_files_that_are_cut_short(tmp_path, form, ending):
    content = {".jsonl": as_jsonl(TEXTS * 99), ".csv": as_csv(TEXTS * 99), ".txt": "text " * 999}[form].encode()
    file = tmp_path / f"x{form}{ending}"
    whole = compress(content, ending)
    for cut in (1, 7, len(whole) // 3):
        file.write_bytes(whole[:-cut])
        with pytest.raises(UserError, match=rf"{re.escape(str(file))} is damaged or cut short: "):
            read(file)
    damaged = bytearray(whole)
    damaged[len(whole) // 3] ^= 0x55
    file.write_bytes(damaged)
    with pytest.raises(UserError, match=r"is damaged or cut short: |does not begin with column names|no column"):
        read(file)
    file.write_bytes(b"not compressed")
    with pytest.raises(UserError, match="is damaged or cut short: "):
        read(file)


def test_a_window_that_is_larger_than_usual(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "x.jsonl.zst").write_bytes(packer.compress(as_jsonl(["long"]).encode()) + packer.flush())
    assert pairs(read(tmp_path / "x.jsonl.zst")[0]) == [("x.jsonl.zst@0", "long")]


def test_a_file_that_changes_or_goes(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(as_jsonl(["a"]))
    (piece,) = cut_file(document(file), PLAIN, 1 << 30)
    file.write_text(as_jsonl(["ab"]))
    with pytest.raises(UserError, match=r"x\.jsonl changed while the store was being built"):
        list(read_piece(piece, PLAIN, Meter()))
    file.unlink()
    with pytest.raises(UserError, match=r"cannot read .*x\.jsonl: No such file"):
        list(read_piece(piece, PLAIN, Meter()))


def test_the_meter_tells_bytes_of_the_file(tmp_path):
    file = tmp_path / "x.jsonl.gz"
    texts = [str(zlib.crc32(bytes([i % 256, i // 256]))) * 5 for i in range(30_000)]
    file.write_bytes(gzip.compress(as_jsonl(texts).encode()))
    (piece,) = cut_file(document(file), PLAIN, 1 << 30)
    meter, seen = Meter(), []
    for _ in read_piece(piece, PLAIN, meter):
        seen.append(meter.read())
    assert seen == sorted(seen)
    assert len(set(seen)) >= 2
    assert seen[-1] == file.stat().st_size
