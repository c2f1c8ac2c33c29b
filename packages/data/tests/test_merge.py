import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest

from styrax.core import UserError
from styrax.data import ByteTokenizer, TokenStore, train_bpe, write_store
from styrax.data.build.writer import StoreWriter
from styrax.data.store import merge
from styrax.data.store.merge import merge_stores


def parts(documents, cuts):
    names = list(documents)
    edges = [0, *cuts, len(names)]
    return [{name: documents[name] for name in names[a:b]} for a, b in pairwise(edges)]


def listing(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("block", [1 << 22, 100, 1])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_merged_store_is_the_store_of_all_documents(tmp_path, documents, kind, block, monkeypatch):
    monkeypatch.setattr(merge, "BLOCK_TOKENS", block)
    tokenizer = ByteTokenizer() if kind == "byte" else train_bpe(documents.values(), 300)
    stores = [
        write_store(tmp_path / f"{i}", part, tokenizer) for i, part in enumerate(parts(documents, [1, 2, 17, 30]))
    ]
    mixed = [store if i % 2 else store.path for i, store in enumerate(stores)]
    got = merge_stores(mixed, tmp_path / "got")
    expected = write_store(tmp_path / "expected", documents, tokenizer)
    assert got.fingerprint == expected.fingerprint
    for name in expected.meta["files"]:
        assert (got.path / name).read_bytes() == (expected.path / name).read_bytes()
    assert [got.text(i) for i in range(len(got))] == list(documents.values())
    got.verify()
    assert [part["fingerprint"] for part in got.meta["build"]["merged"]] == [store.fingerprint for store in stores]


def test_one_store_is_copied(tmp_path, store):
    assert merge_stores([store], tmp_path / "copy").fingerprint == store.fingerprint
    with pytest.raises(UserError, match="there is nothing to merge"):
        merge_stores([], tmp_path / "none")


def test_masks_and_refused_records(tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(merge, "BLOCK_BYTES", 7)
    masks = {"a": [0, 1, 1], "b": [0, 0, 0, 1]}
    refused = [b'{"id": "x", "reason": "r", "excerpt": ""}\n', b'{"id": "y", "reason": "r", "excerpt": "\xc3\xa9"}\n']
    with StoreWriter(tmp_path / "1", ByteTokenizer(), mask=True) as writer:
        for name, mask in masks.items():
            row = np.array([*(name * (len(mask) - 1)).encode(), 256])
            writer.add(name, row, size=len(row) - 1, mask=np.array(mask, np.uint8))
        writer.refuse(refused[0], 1)
        one = writer.finish(build={}, report={"read": 3, "dropped": {"short": 1, "long": 2}, "by": "x"})
    with StoreWriter(tmp_path / "2", ByteTokenizer()) as writer:
        writer.add("c", np.array([99, 256]), size=1)
        writer.refuse(refused[1], 1)
        other = writer.finish(build={}, report={"read": 2, "dropped": {"short": 4}})
    with StoreWriter(tmp_path / "3", ByteTokenizer()) as writer:
        writer.add("d", np.array([100, 100, 256]), size=2)
        last = writer.finish(build={}, report={})
    got = merge_stores([one, other, last], tmp_path / "got")
    assert got.mask is not None
    assert got.mask.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert bytes(got.tokens.astype(np.uint8)) == b"aa\0bbb\0c\0dd\0"
    assert (got.path / "quarantine-00000.jsonl").read_bytes() == b"".join(refused)
    reports = [part.meta["report"] for part in (one, other, last)]
    assert got.meta["report"] == {"read": 5, "dropped": {"short": 5, "long": 2}, "merged": reports}
    got.verify()


def test_different_tokenizers_are_refused(tmp_path, documents):
    stores = [
        write_store(tmp_path / "byte", {"a": "x"}, ByteTokenizer()),
        write_store(tmp_path / "bpe", {"b": "x"}, train_bpe(documents.values(), 300)),
    ]
    with pytest.raises(UserError) as caught:
        merge_stores(stores, tmp_path / "got")
    for part in (
        "fingerprint is 'bpe-",
        "but 'byte-1' in",
        "vocab_size is 300, but 258",
        "build them with one tokenizer",
    ):
        assert part in str(caught.value)
    assert listing(tmp_path) == ["bpe", "byte"]


def test_ids_that_collide_are_named(tmp_path):
    texts = [{"a": "x", "b": "y"}, {"c": "x"}, {"b": "z", "d": "z"}]
    stores = [write_store(tmp_path / f"{i}", text, ByteTokenizer()) for i, text in enumerate(texts)]
    with pytest.raises(UserError, match="1 ids name several documents") as caught:
        merge_stores(stores, tmp_path / "got")
    assert f"'b' is in {tmp_path / '0'} and in {tmp_path / '2'}" in str(caught.value)
    assert "'a'" not in str(caught.value)
    big = write_store(tmp_path / "big", {f"{i}": "x" for i in range(30)}, ByteTokenizer())
    with pytest.raises(UserError, match="30 ids name several documents") as caught:
        merge_stores([big, big], tmp_path / "got")
    assert "and 20 more" in str(caught.value)
    assert "got" not in listing(tmp_path)


def test_equal_hashes_of_different_ids_are_no_collision(tmp_path, monkeypatch):
    monkeypatch.setattr("styrax.data.build.writer.hash64", lambda purpose, text: len(text))
    stores = [write_store(tmp_path / name, {name: "x"}, ByteTokenizer()) for name in "ab"]
    assert merge_stores(stores, tmp_path / "got").ids == ["a", "b"]


def test_a_damaged_store_is_not_merged(tmp_path, documents):
    stores = [write_store(tmp_path / f"{i}", part, ByteTokenizer()) for i, part in enumerate(parts(documents, [20]))]
    file = stores[1].path / "tokens-00000.bin"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        merge_stores([store.path for store in stores], tmp_path / "got")
    assert listing(tmp_path) == ["0", "1"]


def test_an_existing_store_is_replaced_when_asked(tmp_path):
    for name in "ab":
        write_store(tmp_path / name, {name: name * 3}, ByteTokenizer())
    with pytest.raises(UserError, match="already exists"):
        merge_stores([tmp_path / "a", tmp_path / "b"], tmp_path / "a")
    merge_stores([tmp_path / "a", tmp_path / "b"], tmp_path / "a", overwrite=True)
    again = TokenStore(tmp_path / "a")
    assert [again.text(i) for i in range(2)] == ["aaa", "bbb"]
    assert listing(tmp_path) == ["a", "b"]
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    tokens = (tmp_path / "a" / "tokens-00000.bin").read_bytes()
    assert meta["files"]["tokens-00000.bin"]["shards"] == [hashlib.sha256(tokens).hexdigest()]
