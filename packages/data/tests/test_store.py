import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from styrax.core import UserError
from styrax.data import ByteTokenizer, TokenStore, build_store, train_bpe, write_store
from styrax.data.atomic import sweep
from styrax.data.build import StoreWriter, parts, writer
from styrax.data.store import format as store_format


@pytest.fixture
def corpus(tmp_path, documents):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in documents.items():
        (folder / name.replace("/", "-")).write_text(text, encoding="utf-8", newline="")
    return folder


def listing(folder):
    return sorted(entry.name for entry in folder.iterdir())


def leftovers(folder):
    return [name for name in listing(folder) if name.startswith(".")]


def test_a_store_holds_its_documents(store, documents):
    assert store.ids == list(documents)
    assert [store.text(i) for i in range(len(store))] == list(documents.values())
    assert store.num_bytes == sum(len(text.encode()) for text in documents.values())
    assert store.num_tokens == store.num_bytes + len(documents)
    assert store.tokens.dtype == np.dtype("<u2")
    np.testing.assert_array_equal(store[-1], [*list(documents.values())[-1].encode(), 256])
    assert store.docs["bytes"].tolist() == [len(text.encode()) for text in documents.values()]
    with pytest.raises(IndexError):
        store[len(store)]
    store.verify()
    assert pickle.loads(pickle.dumps(store)).fingerprint == store.fingerprint


def test_two_builds_are_the_same_bytes(corpus, tmp_path):
    stores = [build_store([corpus], tmp_path / name, tokenizer="bpe:300") for name in "ab"]
    assert stores[0].fingerprint == stores[1].fingerprint
    for name in [*stores[0].meta["files"], "meta.json"]:
        assert (stores[0].path / name).read_bytes() == (stores[1].path / name).read_bytes()


def test_the_fingerprint_is_what_a_store_holds(corpus, tmp_path, documents):
    one = build_store([corpus], tmp_path / "one", tokenizer="byte")
    other = build_store([f"{corpus}/*"], tmp_path / "other", tokenizer=ByteTokenizer())
    assert one.fingerprint == other.fingerprint
    assert one.meta["build"] != other.meta["build"]
    renamed = write_store(tmp_path / "r", {f"{name}!": text for name, text in documents.items()}, ByteTokenizer())
    assert renamed.fingerprint != one.fingerprint


def test_wide_vocabularies_take_four_bytes(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000

    store = write_store(tmp_path / "s", {"a": "hi"}, Wide())
    assert store.tokens.dtype == np.dtype("<u4")
    assert store[0].tolist() == [104, 105, 256]


def test_empty_documents_are_left_out(tmp_path):
    store = write_store(tmp_path / "s", {"a": "", "b": "x", "c": ""}, ByteTokenizer())
    assert store.ids == ["b"]
    with pytest.raises(UserError, match="no text"):
        write_store(tmp_path / "t", {"a": ""}, ByteTokenizer())
    assert listing(tmp_path) == ["s"]


@pytest.mark.parametrize(
    ("documents", "got"),
    [
        (b"text", "; got bytes"),
        ("text", "; got str"),
        (3, "; got int"),
        (["text"], "; document 0 is str"),
        ([("a", "x"), ("b", b"y")], r"; document 1 is \(str, bytes\); decode bytes first"),
        ({1: "x"}, r"; document 0 is \(int, str\)"),
        ([("a", "b", "c")], r"; document 0 is \(str, str, str\)"),
    ],
)
def test_documents_of_another_kind_are_explained(documents, got, tmp_path):
    with pytest.raises(UserError, match=r"documents: expected texts by id, .* or pairs of id and text" + got):
        write_store(tmp_path / "s", documents, ByteTokenizer())
    assert list(tmp_path.iterdir()) == []


def test_splitting_and_replacing(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"one\n\ntwo\xff\n\nthree")
    store = build_store([tmp_path / "x.txt"], tmp_path / "s", tokenizer="byte", split_on="\n\n", errors="replace")
    assert store.ids == ["x.txt#0", "x.txt#1", "x.txt#2"]
    assert [store.text(i) for i in range(3)] == ["one\n\n", "two\ufffd\n\n", "three"]
    with pytest.raises(UserError, match="byte offset 8"):
        build_store([tmp_path / "x.txt"], tmp_path / "t", tokenizer="byte")
    assert leftovers(tmp_path) == []
    with pytest.raises(UserError, match="no text"):
        build_store([tmp_path / "x.txt"], tmp_path / "t", tokenizer="byte", errors="skip")


def test_two_documents_with_one_id_are_refused(tmp_path):
    with pytest.raises(UserError, match="two documents have the id 'a'"):
        write_store(tmp_path / "s", [("a", "x"), ("a", "y")], ByteTokenizer())
    assert listing(tmp_path) == []


def test_a_lossy_tokenizer_is_refused(tmp_path):
    class Lossy(ByteTokenizer):
        def encode_batch(self, texts):
            return [row[:-1] for row in super().encode_batch(texts)]

    with pytest.raises(UserError, match="'a' has 2 bytes, but its tokens stand for 1"):
        write_store(tmp_path / "s", {"a": "hi"}, Lossy())


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:12", "bpe4096", "bites"])
def test_a_tokenizer_that_is_none(corpus, tmp_path, spec):
    with pytest.raises(UserError, match=r"expected 'byte', 'bpe:N' with N of 258 or more"):
        build_store([corpus], tmp_path / "s", tokenizer=spec)


def test_a_tokenizer_file(corpus, tmp_path):
    train_bpe(["some text"], 270).save(tmp_path / "t.json")
    store = build_store([corpus], tmp_path / "s", tokenizer=str(tmp_path / "t.json"))
    assert store.tokenizer.fingerprint == train_bpe(["some text"], 270).fingerprint


def cut(file, by=1):
    file.write_bytes(file.read_bytes()[:-by])


def edit(file, **change):
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, **change}))


DAMAGE = {
    "tokens cut short": (lambda s: cut(s / "tokens-00000.bin", 2), r"tokens-00000\.bin: expected \d+ bytes, got \d+"),
    "tokens missing": (lambda s: (s / "tokens-00000.bin").unlink(), r"tokens-00000\.bin: expected \d+ bytes, got no"),
    "docs cut short": (lambda s: cut(s / "docs-00000.npy"), r"docs-00000\.npy: expected"),
    "ids cut short": (lambda s: cut(s / "ids-00000.jsonl"), r"ids-00000\.jsonl: expected"),
    "tokenizer missing": (lambda s: (s / "tokenizer.json").unlink(), r"tokenizer\.json: expected"),
    "meta cut short": (lambda s: cut(s / "meta.json", 9), r"meta\.json is damaged: expected JSON"),
    "meta edited": (lambda s: edit(s / "meta.json", num_tokens=5), r"meta\.json is damaged: expected checksum"),
    "meta from the future": (lambda s: edit(s / "meta.json", version=99), "expected store version 2, got 99"),
    "another format": (lambda s: edit(s / "meta.json", format="x"), "expected the meta of a styrax-token-store"),
    "no meta": (lambda s: (s / "meta.json").unlink(), r"has no meta\.json; build one"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_store_is_one_clear_error(corpus, tmp_path, what):
    out = tmp_path / "s p a c e"
    build_store([corpus], out, tokenizer="byte", split_on="\n")
    damage, message = DAMAGE[what]
    damage(out)
    with pytest.raises(UserError, match=message) as caught:
        TokenStore(out)
    assert str(out) in str(caught.value)
    if what not in ("no meta", "another format", "meta cut short"):
        assert f"styrax data build {corpus} --tokenizer byte --errors raise" in str(caught.value)
        assert f"--out '{out}' --overwrite" in str(caught.value)


def test_a_flipped_byte_is_found_by_verify(corpus, tmp_path):
    store = build_store([corpus], tmp_path / "s", tokenizer="byte")
    for name in ("tokens-00000.bin", "ids-00000.jsonl"):
        content = bytearray((store.path / name).read_bytes())
        content[20] ^= 1
        (store.path / name).write_bytes(content)
    with pytest.raises(UserError, match="expected sha256") as caught:
        TokenStore(store.path).verify()
    assert "tokens-00000.bin" in str(caught.value)
    assert "ids-00000.jsonl" in str(caught.value)


def test_records_that_do_not_add_up_are_found_at_once(corpus, tmp_path):
    store = build_store([corpus], tmp_path / "s", tokenizer="byte")
    docs = store.docs.copy()
    docs["start"][3] += 1
    np.save(store.path / "docs-00000.npy", docs)
    with pytest.raises(UserError, match="do not add up"):
        TokenStore(store.path)


def test_a_changed_tokenizer_is_found(corpus, tmp_path):
    store = build_store([corpus], tmp_path / "s", tokenizer="bpe:300")
    file = store.path / "tokenizer.json"
    content = file.read_text(encoding="utf-8")
    assert '"!":2' in content
    assert '"#":4' in content
    file.write_text(content.replace('"!":2', '"!":4').replace('"#":4', '"#":2'), encoding="utf-8")
    with pytest.raises(UserError, match="expected tokenizer bpe-"):
        _ = TokenStore(store.path).tokenizer


def test_nothing_is_replaced_unasked(corpus, tmp_path, store):
    out = tmp_path / "s"
    first = build_store([corpus], out, tokenizer="byte")
    with pytest.raises(UserError, match=r"already exists; choose another name, or overwrite it \(--overwrite"):
        build_store([corpus], out, tokenizer="bpe:300")
    # The old store stays readable where it is open.
    second = build_store([corpus], out, tokenizer="bpe:300", overwrite=True)
    assert first.text(0) == second.text(0)
    assert first.fingerprint != second.fingerprint == TokenStore(out).fingerprint
    assert leftovers(tmp_path) == []
    with pytest.raises(UserError, match="corpus is not a token store, so it will not be replaced"):
        build_store([corpus], corpus, tokenizer="byte", overwrite=True)
    assert len(listing(corpus)) == len(store)


def test_overwriting_without_an_exchange_of_names(corpus, tmp_path, monkeypatch):
    from styrax.data import atomic

    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    build_store([corpus], tmp_path / "s", tokenizer="byte")
    build_store([corpus], tmp_path / "s", tokenizer="bpe:300", overwrite=True)
    assert TokenStore(tmp_path / "s").tokenizer.vocab_size == 300
    assert leftovers(tmp_path) == []
    # Killed between the two renames: the old store comes back.
    (tmp_path / "s").rename(tmp_path / ".s.0123456789abcdef.old")
    atomic.sweep(tmp_path / "s")
    assert TokenStore(tmp_path / "s").tokenizer.vocab_size == 300


def test_a_failed_overwrite_leaves_the_old_store(corpus, tmp_path):
    old = build_store([corpus], tmp_path / "s", tokenizer="byte")
    (corpus / "zz.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="byte offset 0"):
        build_store([corpus], tmp_path / "s", tokenizer="byte", overwrite=True)
    assert TokenStore(tmp_path / "s").fingerprint == old.fingerprint
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("code", "word"), [(errno.ENOSPC, "free some space"), (errno.EACCES, "that you can write")])
def test_the_disk_refuses(corpus, tmp_path, monkeypatch, code, word):
    def refuse(file):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(parts, "sync_file", refuse)
    with pytest.raises(UserError, match=word) as caught:
        build_store([corpus], tmp_path / "s", tokenizer="byte")
    assert os.strerror(code) in str(caught.value)
    assert listing(tmp_path) == ["corpus"]
    monkeypatch.undo()
    # Later, when the parts are done and only the store is not: they are kept, and the error says so.
    monkeypatch.setattr(writer, "sync_file", refuse)
    with pytest.raises(UserError, match=word) as caught:
        build_store([corpus], tmp_path / "s", tokenizer="byte")
    assert f"(1 finished parts are kept in {tmp_path / '.s.parts'}: the same build goes on" in str(caught.value)
    assert listing(tmp_path) == [".s.parts", "corpus"]
    monkeypatch.undo()
    build_store([corpus], tmp_path / "s", tokenizer="byte").verify()
    assert listing(tmp_path) == ["corpus", "s"]


def test_an_out_below_a_file(corpus, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        build_store([corpus], tmp_path / "file" / "s", tokenizer="byte")


SLOW_BUILD = """
import sys, time
from styrax.data import ByteTokenizer, write_store
def documents():
    for i in range(40):
        if i == 20:
            print("half", flush=True)
            time.sleep(60)
        yield f"{i}", "x" * 200_000
write_store(sys.argv[1], documents(), ByteTokenizer())
"""


def test_kill_9_leaves_nothing_that_looks_like_a_store(tmp_path, python_env):
    out = tmp_path / "s"
    command = [sys.executable, "-c", SLOW_BUILD, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=python_env) as build:
        assert build.stdout.readline() == b"half\n"
        (building,) = leftovers(tmp_path)
        # A living build is not swept by another one.
        write_store(tmp_path / "s2", {"a": "x"}, ByteTokenizer())
        assert listing(tmp_path / building)
        sweep(out)
        assert leftovers(tmp_path) == [building]
        build.send_signal(signal.SIGKILL)
    assert leftovers(tmp_path) == [building]
    with pytest.raises(UserError, match="does not exist"):
        TokenStore(out)
    with pytest.raises(UserError):
        TokenStore(tmp_path / building)
    store = write_store(out, {"a": "hi"}, ByteTokenizer())
    store.verify()
    assert leftovers(tmp_path) == []


def test_progress_counts_bytes(corpus, tmp_path, documents):
    seen = []
    build_store([corpus], tmp_path / "s", tokenizer="bpe:300", progress=lambda *event: seen.append(event))
    total = sum(len(text.encode()) for text in documents.values())
    assert seen == [("train tokenizer", 0, None), ("tokenize", total, total)]


def small_shards(monkeypatch, size):
    monkeypatch.setattr(store_format, "SHARD_BYTES", size)


def test_there_is_a_checksum_for_every_stretch(corpus, tmp_path, monkeypatch):
    small_shards(monkeypatch, 1000)
    store = build_store([corpus], tmp_path / "s", tokenizer="byte")
    assert store.meta["version"] == 2
    for name, entry in store.meta["files"].items():
        content = (store.path / name).read_bytes()
        assert entry["bytes"] == len(content)
        stretches = [content[i : i + 1000] for i in range(0, len(content), 1000)]
        assert entry["shards"] == [hashlib.sha256(stretch).hexdigest() for stretch in stretches]


def test_verify_names_every_damaged_stretch(corpus, tmp_path, monkeypatch):
    small_shards(monkeypatch, 1000)
    store = build_store([corpus], tmp_path / "s", tokenizer="byte")
    file = store.path / "tokens-00000.bin"
    content = bytearray(file.read_bytes())
    last = len(content) - 1
    for place in (999, 3000, last):
        content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        store.verify()
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    places = [(0, 999), (3000, 3999), (last // 1000 * 1000, last)]
    assert [line.split(": expected")[0] for line in lines] == [f"  - {file}, bytes {a} to {b}" for a, b in places]
    # Cut short since it was opened.
    file.write_bytes(content[:-2])
    with pytest.raises(UserError, match=rf"expected {len(content)} bytes, got {len(content) - 2}"):
        store.verify()


def masked(out, **options):
    with StoreWriter(out, ByteTokenizer(), mask=True, **options) as writing:
        writing.add("a", np.array([104, 105, 256]), 2, np.array([0, 1, 1]))
        writing.add("b", np.array([33, 256]), 1, np.array([0, 1]))
        return writing.finish(build={}, report={"kept": 2})


def test_a_mask_says_which_tokens_carry_loss(tmp_path, store):
    made = masked(tmp_path / "s")
    made.verify()
    assert made.mask.dtype == np.uint8
    assert made.mask.tolist() == [0, 1, 1, 0, 1]
    assert made.meta["report"] == {"kept": 2}
    assert store.mask is None
    plain = write_store(tmp_path / "t", {"a": "hi", "b": "!"}, ByteTokenizer())
    assert plain.tokens.tolist() == made.tokens.tolist()
    assert plain.fingerprint != made.fingerprint
    cut(made.path / "mask-00000.bin")
    with pytest.raises(UserError, match=r"mask-00000\.bin: expected 5 bytes, got 4"):
        TokenStore(made.path)


BAD_DOCUMENTS = {
    "no end": (([104, 105], 2), "ends in the end token 256"),
    "nothing": (([], 0), "ends in the end token 256"),
    "not ids": ((np.array([1.5, 256.0]), 1), "expected a row of token ids .* got float64"),
    "out of the vocabulary": (([300, 256], 1), "expected ids from 0 to 257, got 256 to 300"),
    "below zero": (([-1, 256], 1), "expected ids from 0 to 257, got -1 to 256"),
    "a mask": (([1, 256], 1, [1, 1]), "mask=True"),
}


@pytest.mark.parametrize("what", BAD_DOCUMENTS)
def test_the_writer_refuses_what_is_no_document(tmp_path, what):
    document, message = BAD_DOCUMENTS[what]
    with pytest.raises(UserError, match=message), StoreWriter(tmp_path / "s", ByteTokenizer()) as writing:
        writing.add("x", np.array(document[0]), *document[1:])
    assert listing(tmp_path) == []


@pytest.mark.parametrize(("mask", "message"), [(None, "got none"), ([1], r"shape \[1\]"), ([0, 2], "zeros and ones")])
def test_the_writer_refuses_what_is_no_mask(tmp_path, mask, message):
    with pytest.raises(UserError, match=message), StoreWriter(tmp_path / "s", ByteTokenizer(), mask=True) as writing:
        writing.add("x", np.array([1, 256]), 1, None if mask is None else np.array(mask))
    assert listing(tmp_path) == []


def test_a_writer_that_is_left_early_leaves_nothing(tmp_path):
    with StoreWriter(tmp_path / "s", ByteTokenizer()) as writing:
        writing.add("x", np.array([1, 256]), 1)
    assert listing(tmp_path) == []


def test_documents_by_the_one_and_by_the_many(tmp_path, store, documents):
    names, half = list(documents), 17
    with StoreWriter(tmp_path / "s", ByteTokenizer()) as writing:
        for index in range(half):
            writing.add(names[index], store[index], int(store.docs["bytes"][index]))
        docs = store.docs[half:]
        writing.extend(names[half:], docs["id_hash"], docs["tokens"], docs["bytes"], store.tokens[docs["start"][0] :])
        again = writing.finish(build={}, report={})
    assert again.fingerprint == store.fingerprint
    for name in store.meta["files"]:
        assert (again.path / name).read_bytes() == (store.path / name).read_bytes()


def test_names_of_one_hash_are_two_names(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "hash64", lambda purpose, name: 7)
    made = write_store(tmp_path / "s", {"a": "x", "b": "y"}, ByteTokenizer())
    assert made.ids == ["a", "b"]
    with pytest.raises(UserError, match="two documents have the id 'a'"):
        write_store(tmp_path / "t", [("a", "x"), ("b", "y"), ("a", "z")], ByteTokenizer())


def test_a_store_of_an_older_version(corpus, tmp_path):
    build_store([corpus], tmp_path / "s", tokenizer="byte")
    edit(tmp_path / "s" / "meta.json", version=1)
    with pytest.raises(UserError, match="expected store version 2, got 1; an older styrax-data wrote it; build it"):
        TokenStore(tmp_path / "s")


def test_opening_is_cheap(tmp_path):
    store = write_store(tmp_path / "s", {str(i): "x" * 1000 for i in range(2000)}, ByteTokenizer())
    costs = []
    for _ in range(5):
        begin = time.perf_counter()
        TokenStore(store.path)
        costs.append(time.perf_counter() - begin)
    assert min(costs) < 0.1
