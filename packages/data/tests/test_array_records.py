import json
import sys
from itertools import pairwise

import pytest

from styrax.core import UserError
from styrax.data.build.array_records import count, decode_record, read_array_records


def write(path, records, options="group_size:3"):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.fixture
def texts():
    return [f"document {i} " * (i * 40) + "é" for i in range(20)]


@pytest.mark.parametrize("options", ["group_size:1", "group_size:3", "group_size:3,uncompressed"])
def test_records_come_in_order_in_any_range(tmp_path, texts, options):
    path = write(tmp_path / "a.array_record", [text.encode() for text in texts], options)
    assert count(path) == count(str(path)) == 20
    for start, stop in ((0, 20), (0, 0), (7, 7), (20, 20), (5, 6), (2, 19)):
        assert list(read_array_records(path, start, stop)) == texts[start:stop]
    cuts = [0, 3, 4, 11, 20]
    assert [text for a, b in pairwise(cuts) for text in read_array_records(path, a, b)] == texts


def test_a_file_without_records(tmp_path):
    path = write(tmp_path / "a.array_record", [])
    assert count(path) == 0
    assert list(read_array_records(path, 0, 0)) == []


def test_json_objects_and_text(tmp_path):
    records = [{"text": "né", "n": 1}, "plain", [1, 2], ""]
    path = write(
        tmp_path / "a.array_record", [r.encode() if isinstance(r, str) else json.dumps(r).encode() for r in records]
    )
    assert list(read_array_records(path, 0, 4)) == [records[0], "plain", "[1, 2]", ""]
    assert list(read_array_records(path, 1, 3, bytes)) == [b"plain", b"[1, 2]"]
    assert list(read_array_records(path, 0, 2, lambda record: len(record))) == [len(json.dumps(records[0])), 5]


def test_records_that_are_no_document(tmp_path):
    path = write(tmp_path / "a.array_record", [b"fine", b"\x0a\xff\x01", b'{"text": 1', b"fine"])
    reading = read_array_records(path, 0, 4)
    assert next(reading) == "fine"
    with pytest.raises(
        UserError, match=r"a\.array_record, record 1: expected UTF-8 .* begin with 0a ff 01.* pass decode="
    ):
        next(reading)
    with pytest.raises(UserError, match="record 2: begins with a brace, but is not a JSON object"):
        list(read_array_records(path, 2, 4))
    # One by one, as a reader with a quarantine does.
    kept, refused = [], []
    for record in read_array_records(path, 0, 4, bytes):
        try:
            kept.append(decode_record(record))
        except UserError as error:
            refused.append(str(error))
    assert kept == ["fine", "fine"]
    assert len(refused) == 2


def test_errors_of_decode_pass_through(tmp_path):
    path = write(tmp_path / "a.array_record", [b"one"])
    with pytest.raises(KeyError, match="mine"):
        list(read_array_records(path, 0, 1, lambda record: {}["mine"]))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 21), (3, 2), (21, 21)])
def test_ranges_that_are_not_there(tmp_path, texts, start, stop):
    path = write(tmp_path / "a.array_record", [text.encode() for text in texts])
    with pytest.raises(UserError, match=f"expected a range of records from 0 to 20, got {start} to {stop}"):
        list(read_array_records(path, start, stop))


def test_damaged_files(tmp_path, texts):
    path = write(tmp_path / "a.array_record", [text.encode() for text in texts], "group_size:1,uncompressed")
    content = path.read_bytes()
    place = content.index(b"document 9 document 9")
    path.write_bytes(content[:place] + b"D" + content[place + 1 :])
    assert count(path) == 20
    assert list(read_array_records(path, 0, 9)) == texts[:9]
    with pytest.raises(UserError, match=r"a\.array_record is damaged at record 9 of 20: .*copy or make the file anew"):
        list(read_array_records(path, 4, 20))
    for wrong in (content[:-1], content[: len(content) // 2], b"", b"text " * 50_000):
        path.write_bytes(wrong)
        for read in (count, lambda path: list(read_array_records(path, 0, 1))):
            with pytest.raises(UserError, match=rf"expected a whole \.array_record file, got {len(wrong)} bytes"):
                read(path)


def test_files_that_are_missing(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        count(tmp_path / "a.array_record")
    with pytest.raises(UserError, match="expected a file, got a folder"):
        list(read_array_records(tmp_path, 0, 1))


def test_reading_can_stop_early(tmp_path, texts):
    path = write(tmp_path / "a.array_record", [text.encode() for text in texts])
    reading = read_array_records(path, 0, 20)
    assert next(reading) == texts[0]
    reading.close()
    assert list(read_array_records(path, 1, 2)) == texts[1:2]


def test_a_system_without_array_record(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(UserError, match="needs the package array_record"):
        count(tmp_path / "a.array_record")


def test_a_store_is_built_from_them_by_any_number_of_workers(tmp_path, texts, monkeypatch):
    from styrax.data import ByteTokenizer, Quarantine, build_store
    from styrax.data.build import units

    monkeypatch.setattr(units, "PIECE_BYTES", 500)
    records = [text.encode() for text in texts] + [b'{"text": "from JSON", "n": 1}', b'{"text": 5}', b"\xff"]
    write(tmp_path / "a.array_record", records)
    source = tmp_path / "a.array_record"
    with pytest.raises(UserError, match=r"a\.array_record, record 21 .*no text"):
        build_store([source], tmp_path / "s", tokenizer=ByteTokenizer(), workers=1)
    stores = [
        build_store(
            [source], tmp_path / f"s{n}", tokenizer=ByteTokenizer(), workers=n, on_error=Quarantine(max_fraction=0.1)
        )
        for n in (1, 2)
    ]
    assert stores[0].fingerprint == stores[1].fingerprint
    assert [stores[0].text(i) for i in range(len(stores[0]))] == [*texts, "from JSON"]
    assert stores[0].ids == [f"a.array_record@{i}" for i in range(21)]
