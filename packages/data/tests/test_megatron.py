import json
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data import ByteTokenizer, LMData, write_store
from styrax.data.store import RECORD, megatron
from styrax.data.store.megatron import MegatronStore

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write(prefix, documents, dtype="uint16", *, version=1, magic=b"MMIDIDX\x00\x00", modes=b"", pad=b"", between=b""):
    """Write documents, each a list of sequences, as Megatron's IndexedDatasetBuilder does, one value at a time."""
    sizes, pointers, edges, body = [], [], [0], b""
    for document in documents:
        for sequence in document:
            sizes.append(len(sequence))
            pointers.append(len(body))
            body += np.array(sequence, dtype=dtype).tobytes()
        edges.append(len(sizes))
        body += between
    index = magic + struct.pack("<QBQQ", version, CODES[dtype], len(sizes), len(edges))
    index += b"".join(struct.pack("<i", size) for size in sizes)
    index += b"".join(struct.pack("<q", value) for value in [*pointers, *edges])
    prefix.with_name(prefix.name + ".idx").write_bytes(index + modes)
    prefix.with_name(prefix.name + ".bin").write_bytes(body + pad)
    return prefix


def patch(prefix, offset, form, value):
    """Overwrite one value in the index."""
    file = prefix.with_name(prefix.name + ".idx")
    content = bytearray(file.read_bytes())
    struct.pack_into(form, content, offset, value)
    file.write_bytes(content)


THREE = [[[1, 2, 0]], [[3], [4, 5, 0]], [[6, 0]]]
NUMBERS = {"vocab_size": 10, "eos_id": 0}


def flat(document):
    return [token for sequence in document for token in sequence]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4), min_size=1, max_size=8),
    st.sampled_from([name for name in CODES if "float" not in name]),
)
def test_documents_are_runs_of_sequences(tmp_path_factory, documents, dtype):
    prefix = write(tmp_path_factory.mktemp("m") / "web.v1", documents, dtype)
    expected = {f"web.v1#{i}": flat(document) for i, document in enumerate(documents) if flat(document)}
    if not expected:
        with pytest.raises(UserError, match="holds no tokens"):
            MegatronStore(prefix, vocab_size=100, eos_id=0, ended=False)
        return
    store = MegatronStore(prefix, vocab_size=100, eos_id=0, ended=False)
    assert len(store) == len(store.ids) == len(expected)
    assert {name: store[i].tolist() for i, name in enumerate(store.ids)} == expected
    assert store.docs.dtype == RECORD
    assert store.docs["tokens"].tolist() == [len(tokens) for tokens in expected.values()]
    assert store.num_tokens == sum(map(len, expected.values()))
    assert store.tokens.dtype == dtype
    assert store.tokens.tolist() == [token for tokens in expected.values() for token in tokens]
    assert store.mask is None
    store.verify()


def test_gaps_between_documents_are_allowed_but_not_within(tmp_path):
    prefix = write(tmp_path / "m", THREE, between=b"\xff\xff")
    store = MegatronStore(f"{prefix}.idx", **NUMBERS)
    assert [row.tolist() for row in store] == list(map(flat, THREE))
    assert store[-1].tolist() == [6, 0]
    with pytest.raises(IndexError):
        store[3]
    with pytest.raises(UserError, match=r"m\.bin: expected 18 bytes, got 24"):
        store.verify()
    patch(prefix, 34 + 4 * 4 + 2 * 8, "<q", 12)  # sequence 2 begins later than sequence 1 ends
    with pytest.raises(UserError, match=r"1 sequences do not follow .* sequence 2 in document 1; expected each doc"):
        MegatronStore(prefix, **NUMBERS)


def test_batches_are_those_of_a_token_store(tmp_path, documents):
    native = write_store(tmp_path / "s", documents, ByteTokenizer())
    rows = [native[i].tolist() for i in range(len(native))]
    prefix = write(tmp_path / "m", [[row[: i % 3], row[i % 3 :]] for i, row in enumerate(rows)], "int32")
    store = MegatronStore(prefix, tokenizer=ByteTokenizer())
    assert store.meta["tokenizer"] == native.meta["tokenizer"]
    assert [store.text(i) for i in range(len(store))] == list(documents.values())
    assert store.num_bytes == native.num_bytes
    assert store.docs["bytes"].sum() == 0
    one, other = (LMData(each, seq_len=64, batch_size=4, held_out=0, seed=3) for each in (store, native))
    assert one.num_rows == other.num_rows
    for step in (0, 1, 17, 90):
        got, expected = one.batch(step), other.batch(step)
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)
    assert {span.document for row in range(4) for span in one.provenance(0, row)} <= set(store.ids)
    split = LMData(store, seq_len=64, batch_size=4, held_out=0.2)
    assert 1 <= len(split.held_out_documents) < len(store) / 2


def test_the_numbers_come_from_the_tokenizer_or_from_the_user(tmp_path):
    prefix = write(tmp_path / "m", [[[104, 105, 256]]])
    ByteTokenizer().save(tmp_path / "t.json")
    for tokenizer in (ByteTokenizer(), tmp_path / "t.json", str(tmp_path / "t.json")):
        store = MegatronStore(prefix, tokenizer=tokenizer, eos_id=256)
        assert store.text(0) == "hi"
    assert store.tokenizer.vocab_size == 258
    with pytest.raises(UserError) as caught:
        MegatronStore(prefix, tokenizer=ByteTokenizer(), eos_id=0, vocab_size=300)
    assert "eos_id = 0, but the tokenizer's is 256" in str(caught.value)
    assert "vocab_size = 300, but the tokenizer's is 258" in str(caught.value)
    with pytest.raises(UserError, match=r"vocab_size is not given.*\n.*eos_id is not given"):
        MegatronStore(prefix)
    with pytest.raises(UserError, match=r"eos_id = 256: expected 0 to 199, .*\n.*bos_id = -1"):
        MegatronStore(prefix, vocab_size=200, eos_id=256, bos_id=-1)
    store = MegatronStore(prefix, vocab_size=300, eos_id=256)
    assert {name: store.meta["tokenizer"][name] for name in ("vocab_size", "eos_id", "bos_id", "pad_id")} == {
        "vocab_size": 300,
        "eos_id": 256,
        "bos_id": None,
        "pad_id": 256,
    }
    assert store.num_bytes == 0
    with pytest.raises(UserError, match=r"hold no tokenizer, so there is no text; give the tokenizer\.json"):
        store.text(0)


def test_documents_that_do_not_end(tmp_path):
    prefix = write(tmp_path / "m", [*THREE, [[7, 8]]])
    with pytest.raises(UserError, match="1 of 4 sampled documents do not end in eos_id = 0; document m#3 ends in 8"):
        MegatronStore(prefix, **NUMBERS)
    with pytest.raises(UserError, match=r"4 of 4 .* pass the right eos_id, or ended=False"):
        MegatronStore(prefix, vocab_size=10, eos_id=9)
    assert len(MegatronStore(prefix, **NUMBERS, ended=False)) == 4


def test_tokens_outside_the_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "BLOCK", 4)
    store = MegatronStore(write(tmp_path / "m", [*THREE, [[12, 0]]]), **NUMBERS)
    with pytest.raises(UserError, match=r"expected ids from 0 to 9, got 12 at token 9; made by another"):
        store.verify()
    store = MegatronStore(write(tmp_path / "n", [*THREE, [[-1, 0]]], "int16"), **NUMBERS)
    with pytest.raises(UserError, match="got -1 at token 9"):
        store.verify()


def cut(prefix, ending):
    file = prefix.with_name(prefix.name + ending)
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE = {
    "no index": (lambda p: p.with_name("m.idx").unlink(), r"m\.idx: there is no such file"),
    "no tokens": (lambda p: p.with_name("m.bin").unlink(), r"m\.bin: there is no such file"),
    "an empty index": (lambda p: p.with_name("m.idx").write_bytes(b""), r"m\.idx: expected to begin with b'MMIDIDX"),
    "another index": (lambda p: patch(p, 0, "<q", 7), "no Megatron index"),
    "another version": (lambda p: patch(p, 9, "<Q", 2), "expected version 1, got 2"),
    "an unknown type": (lambda p: patch(p, 17, "<B", 9), r"type of token among 1 \(uint8\), .*8 \(uint16\), got 9"),
    "floats": (lambda p: patch(p, 17, "<B", 7), "got 7"),
    "index cut short": (
        lambda p: cut(p, ".idx"),
        r"m\.idx: expected 114 bytes for 4 sequences and 4 entries .*, got 113",
    ),
    "too many sequences": (lambda p: patch(p, 18, "<Q", 2**40), "for 1099511627776 sequences"),
    "tokens cut short": (lambda p: cut(p, ".bin"), r"m\.bin: expected 18 bytes, got 17: it is cut short"),
    "a negative size": (lambda p: patch(p, 34, "<i", -1), "sizes of 0 or more"),
    "an odd pointer": (lambda p: patch(p, 50 + 8, "<q", 3), "multiples of 2"),
    "documents astray": (lambda p: patch(p, 82 + 8, "<q", 9), "does not lead from sequence 0 to 4"),
    "documents missing": (lambda p: patch(p, 82 + 24, "<q", 3), "does not lead from sequence 0 to 4"),
    "sequences apart": (lambda p: patch(p, 34 + 4, "<i", 2), "sequence 2 in document 1"),
    "modes": (lambda p: write(p, THREE, modes=bytes(4)), "has a mode for each sequence"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_files_are_one_clear_error(tmp_path, what):
    prefix = write(tmp_path / "m", THREE)
    MegatronStore(prefix, **NUMBERS)
    damage, message = DAMAGE[what]
    damage(prefix)
    with pytest.raises(UserError, match=message) as caught:
        MegatronStore(prefix, **NUMBERS)
    assert "copy or make them anew" in str(caught.value)


def test_damage_after_opening_is_found_by_verify(tmp_path):
    prefix = write(tmp_path / "m", THREE)
    store = MegatronStore(prefix, **NUMBERS)
    write(prefix, THREE[::-1])
    with pytest.raises(UserError, match=r"m\.idx: changed since the store was opened"):
        store.verify()


def test_the_fingerprint_is_what_the_store_holds(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    one = MegatronStore(write(tmp_path / "a" / "m", THREE), **NUMBERS)
    same = MegatronStore(write(tmp_path / "b" / "m", THREE), **NUMBERS, bos_id=None, pad_id=0)
    assert one.fingerprint == same.fingerprint
    np.testing.assert_array_equal(one.docs, same.docs)
    others = [
        MegatronStore(write(tmp_path / "n", THREE), **NUMBERS),  # other ids, so another split
        MegatronStore(tmp_path / "a" / "m", vocab_size=11, eos_id=0),
        MegatronStore(write(tmp_path / "b" / "m", [[[1, 3, 0]], *THREE[1:]]), **NUMBERS),
        MegatronStore(write(tmp_path / "b" / "m", [[[1, 2, 0], [3], [4, 5, 0]], [[6, 0]]]), **NUMBERS),
        MegatronStore(write(tmp_path / "b" / "m", THREE, "int32"), **NUMBERS),
    ]
    assert len({store.fingerprint for store in [one, *others]}) == 6
    assert (others[0].docs["id_hash"] != one.docs["id_hash"]).all()
    # Of a large file, the first and the last bytes and evenly spaced ones between count.
    monkeypatch.setattr(megatron, "STRETCHES", 3)
    monkeypatch.setattr(megatron, "STRETCH_BYTES", 8)
    body = [[[*range(1, 50), 0]]]  # 100 bytes: 0 to 7, 46 to 53, 92 to 99
    seen = []
    for place in range(50):
        changed = [[[*body[0][0][:place], 77, *body[0][0][place + 1 :]]]]
        seen.append(MegatronStore(write(tmp_path / "m", changed), vocab_size=100, eos_id=0, ended=False).fingerprint)
    plain = MegatronStore(write(tmp_path / "m", body), vocab_size=100, eos_id=0).fingerprint
    assert [place for place in range(50) if seen[place] != plain] == [0, 1, 2, 3, 23, 24, 25, 26, 46, 47, 48, 49]


def test_pickles_reopen(tmp_path):
    prefix = write(tmp_path / "m", [[[104, 256]], [[105, 256]]])
    for store in (
        MegatronStore(prefix, tokenizer=ByteTokenizer()),
        MegatronStore(prefix, vocab_size=300, eos_id=7, ended=False),
    ):
        content = pickle.dumps(store)
        again = pickle.loads(content)
        assert len(content) < 2000
        assert again.fingerprint == store.fingerprint
        assert again.meta == store.meta == json.loads(json.dumps(store.meta))
        assert again.ids[0:2] == list(store.ids) == ["m#0", "m#1"]
        assert "2 documents, 4 tokens" in repr(again)
