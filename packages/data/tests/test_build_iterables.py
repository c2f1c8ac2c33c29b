"""Python iterables and Hugging Face datasets as sources."""

import pytest

from styrax.core import UserError
from styrax.data import Records
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers import Meter
from styrax.data.build.records import ReadSettings
from styrax.data.build.units import record_units

PLAIN = ReadSettings()


def pairs(records):
    bad = [record for record in records if isinstance(record, Refused)]
    assert bad == []
    return [(record.id, record.text) for record in records]


def numbered(name, texts):
    return [(f"{name}@{number}", text) for number, text in enumerate(texts)]


def refusals(records):
    return [(record.id, record.reason) for record in records if isinstance(record, Refused)]


class Dataset:
    """What the builder uses of a Hugging Face dataset."""

    def __init__(self, rows, columns):
        self.rows, self.column_names = rows, columns

    def select_columns(self, names):
        return Dataset([{name: row[name] for name in names} for row in self.rows], names)

    def iter(self, batch_size):
        for i in range(0, len(self.rows), batch_size):
            rows = self.rows[i : i + batch_size]
            yield {name: [row[name] for row in rows] for name in self.column_names}


def of_records(source, settings=PLAIN):
    return [record for unit in record_units(source, settings) for record in unit.records(settings, Meter())]


def test_iterables(monkeypatch):
    monkeypatch.setattr("styrax.data.build.units.GROUP_BYTES", 20)
    items = ["a text", ("an id", "another"), {"text": "third", "n": 3}, "", 5, ("x", 2), {"txt": ""}, "\ud800"] * 3
    records = of_records(Records(iter(items), name="mine"))
    assert refusals(records)[:4] == [
        ("mine@4", "not a record"),
        ("mine@5", "not a record"),
        ("mine@6", "no text"),
        ("mine@7", "not Unicode"),
    ]
    good = [(record.id, record.text) for record in records if not isinstance(record, Refused)]
    assert good[:4] == [("mine@0", "a text"), ("an id", "another"), ("mine@2", "third"), ("mine@3", "")]
    assert len(good) == 12
    assert pairs(of_records(Records({"a": "x", "b": "y"}))) == [("a", "x"), ("b", "y")]
    assert "its fields: txt" in str(records[6].error())


def test_datasets():
    rows = [{"text": f"text {i}", "url": f"u{i}", "image": object()} for i in range(2500)]
    dataset = Dataset(rows, ["text", "url", "image"])
    expected = [row["text"] for row in rows]
    assert pairs(of_records(Records(dataset, name="d"))) == numbered("d", expected)
    assert pairs(of_records(Records(dataset), ReadSettings(id="url")))[7] == ("u7", "text 7")
    with pytest.raises(UserError, match=r"the dataset has no column 'tekst' \(did you mean 'text'\?\)"):
        of_records(Records(dataset), ReadSettings(text="tekst"))
    with pytest.raises(UserError, match=r"holds several splits; expected one, such as data\['train'\]"):
        Records({"train": dataset, "test": dataset})


def test_real_datasets():
    datasets = pytest.importorskip("datasets")
    columns = {"text": ["a", "b", "c"], "n": [1, 2, 3]}
    for dataset in (datasets.Dataset.from_dict(columns), datasets.Dataset.from_dict(columns).to_iterable_dataset()):
        assert pairs(of_records(Records(dataset, name="d"))) == numbered("d", ["a", "b", "c"])
        (record, *_) = of_records(Records(dataset), ReadSettings(all_fields=True))
        assert record.fields == {"text": "a", "n": 1}


@pytest.mark.parametrize("items", ["a text", b"bytes", 5, None])
def test_what_is_no_iterable_of_records(items):
    with pytest.raises(UserError, match=r"expected an iterable of texts, pairs \(id, text\) or mappings"):
        Records(items)


def test_tables_in_memory_are_given_by_rows():
    class Frame(list):
        columns = ("text",)

    with pytest.raises(UserError, match="give its rows"):
        Records(Frame())
