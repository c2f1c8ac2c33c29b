import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from styrax.data import ByteTokenizer, train_bpe, write_store
from styrax.data.build.writer import StoreWriter
from styrax.data.store import diff
from styrax.data.store.diff import diff_stores
from styrax.data.store.megatron import MegatronStore

texts = st.dictionaries(st.sampled_from("abcdefg"), st.text("xyé", min_size=1, max_size=4), min_size=1)


def write_masked(path, documents):
    """Write documents given as bytes and a mask."""
    with StoreWriter(path, ByteTokenizer(), mask=True) as writer:
        for name, (text, mask) in documents.items():
            writer.add(name, np.array([*text, 256]), size=len(text), mask=np.array(mask, np.uint8))
        return writer.finish(build={}, report={})


def test_equal_stores(tmp_path, store, documents):
    again = write_store(tmp_path / "s", documents, ByteTokenizer(), build={"sources": ["x"]})
    found = diff_stores(store, again)
    assert found["same"] is True
    about = {"fingerprint": store.fingerprint, "documents": 40, "tokens": store.num_tokens, "bytes": store.num_bytes}
    assert found["a"] == {"path": str(store.path), **about}
    assert found["b"] == {"path": str(again.path), **about}
    assert found["settings"] == {"sources": {"b": ["x"]}}
    empty = {"count": 0, "ids": []}
    assert found["only_in_a"] == found["only_in_b"] == found["masks"] == empty
    assert found["changed"] == {"count": 0, "documents": []}
    assert not found["tokenizer"] and not found["moved"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts, texts, st.sampled_from([1, 5, 1000]))
def test_differences_equal_those_of_the_texts(tmp_path_factory, monkeypatch, a, b, block):
    monkeypatch.setattr(diff, "BLOCK_TOKENS", block)
    folder = tmp_path_factory.mktemp("d")
    found = diff_stores(write_store(folder / "a", a, ByteTokenizer()), write_store(folder / "b", b, ByteTokenizer()))
    assert json.loads(json.dumps(found)) == found
    assert found["same"] == (list(a.items()) == list(b.items()))
    assert found["only_in_a"] == {"count": len(set(a) - set(b)), "ids": [name for name in a if name not in b]}
    assert found["only_in_b"] == {"count": len(set(b) - set(a)), "ids": [name for name in b if name not in a]}
    changed = []
    for name in a:
        if name in b and a[name] != b[name]:
            one, other = [*a[name].encode(), 256], [*b[name].encode(), 256]
            first = next(i for i in range(len(one)) if one[: i + 1] != other[: i + 1])
            changed.append({"id": name, "tokens": {"a": len(one), "b": len(other)}, "first": first})
    assert found["changed"] == {"count": len(changed), "documents": changed}
    assert found["moved"] == ([name for name in a if name in b] != [name for name in b if name in a])
    assert found["masks"]["count"] == 0


def test_masks(tmp_path):
    a = {"same": (b"xy", [1, 1, 1]), "other": (b"xy", [0, 1, 1]), "tokens": (b"x", [0, 0]), "none": (b"z", [0, 1])}
    b = {"same": (b"xy", [1, 1, 1]), "other": (b"xy", [1, 1, 1]), "tokens": (b"y", [1, 1])}
    one, other = write_masked(tmp_path / "a", a), write_masked(tmp_path / "b", b)
    plain = write_store(tmp_path / "c", {name: text.decode() for name, (text, _) in b.items()}, ByteTokenizer())
    for against in (other, plain):
        found = diff_stores(one, against)
        assert found["masks"] == {"count": 1, "ids": ["other"]}
        assert [change["id"] for change in found["changed"]["documents"]] == ["tokens"]
        assert found["only_in_a"]["ids"] == ["none"]
    assert diff_stores(other, plain)["masks"]["count"] == 0
    assert diff_stores(other, plain)["same"] is False


def test_lists_are_bounded(tmp_path):
    a = write_store(
        tmp_path / "a", {f"a{i}": "x" for i in range(50)} | {f"{i}": "x" for i in range(30)}, ByteTokenizer()
    )
    b = write_store(tmp_path / "b", {f"{i}": "y" for i in range(30)}, ByteTokenizer())
    found = diff_stores(a, b)
    assert found["only_in_a"] == {"count": 50, "ids": [f"a{i}" for i in range(20)]}
    assert found["changed"]["count"] == 30
    assert [change["id"] for change in found["changed"]["documents"]] == [f"{i}" for i in range(20)]
    assert len(diff_stores(a, b, listed=3)["only_in_a"]["ids"]) == 3


def test_settings_and_tokenizers(tmp_path, documents):
    build = {"errors": "raise", "sources": [f"{i}" for i in range(30)], "dedup": {"ngram": 5, "exact": True}}
    a = write_store(tmp_path / "a", {"a": "x"}, ByteTokenizer(), build=build)
    changed = {**build, "sources": ["0"], "dedup": {"ngram": 6, "exact": True}, "split_on": None}
    b = write_store(tmp_path / "b", {"a": "x"}, train_bpe(documents.values(), 300), build=changed)
    found = diff_stores(a, b)
    assert found["settings"] == {
        "sources": {"a": {"count": 30, "first": build["sources"][:20]}, "b": ["0"]},
        "dedup.ngram": {"a": 5, "b": 6},
        "split_on": {"b": None},
    }
    assert found["tokenizer"]["vocab_size"] == {"a": 258, "b": 300}
    assert found["tokenizer"]["fingerprint"]["a"] == "byte-1"
    assert found["changed"]["count"] == 1


def test_a_megatron_store(tmp_path):
    index = struct.pack("<9sQBQQ2i5q", b"MMIDIDX\x00\x00", 1, 8, 2, 3, 3, 2, 0, 6, 0, 1, 2)
    (tmp_path / "m.idx").write_bytes(index)
    (tmp_path / "m.bin").write_bytes(struct.pack("<5H", 104, 105, 256, 106, 256))
    native = write_store(tmp_path / "s", {"m#0": "hi", "m#1": "x", "m#2": "y"}, ByteTokenizer())
    megatron = MegatronStore(tmp_path / "m", tokenizer=ByteTokenizer())
    found = diff_stores(megatron, native)
    assert found["only_in_a"]["count"] == 0
    assert found["only_in_b"]["ids"] == ["m#2"]
    assert found["changed"]["documents"] == [{"id": "m#1", "tokens": {"a": 2, "b": 2}, "first": 0}]
    assert found["tokenizer"] == {}


@pytest.mark.parametrize("cut", [1, 3])
def test_a_document_that_was_cut(tmp_path, cut):
    a = write_store(tmp_path / "a", {"a": "abcd"}, ByteTokenizer())
    b = write_store(tmp_path / "b", {"a": "abcd"[:cut]}, ByteTokenizer())
    expected = [{"id": "a", "tokens": {"a": 5, "b": cut + 1}, "first": cut}]
    assert diff_stores(a, b)["changed"]["documents"] == expected
