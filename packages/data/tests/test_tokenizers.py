import json
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.core.protocols import Tokenizer
from styrax.data import ByteTokenizer, load_tokenizer, train_bpe
from styrax.data.tokenizer import StoreTokenizer

CORPUS = ["def f(x):\n    return x + 1\n", "the cat sat on the mat, l'été, 日本語 <|endoftext|>"] * 20
BPE = train_bpe(CORPUS, 300)
BOTH = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])


@BOTH
@given(text=st.text())
def test_text_comes_back_exactly_and_bytes_are_counted(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes[np.array(ids, dtype=np.int64)].sum() == len(text.encode())
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert not {tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id} & set(ids)


@BOTH
@given(text=st.text(), cut=st.integers(0, 50))
def test_a_stream_never_splits_a_character(tokenizer, text, cut):
    ids = [*tokenizer.encode(text), tokenizer.eos_id]
    pieces = list(tokenizer.decode_stream(iter(ids)))
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert all(pieces)
    # Any cut gives the whole characters so far; at most one U+FFFD for the rest.
    start = "".join(tokenizer.decode_stream(ids[:cut]))
    assert text.startswith(start.rstrip("\ufffd")) or "\ufffd" in text
    assert start == tokenizer.decode(ids[:cut])


@BOTH
def test_a_stream_yields_as_soon_as_it_can(tokenizer):
    seen = []

    def ids():
        for token in tokenizer.encode("aé!"):
            yield token
            seen.append(token)

    first = next(tokenizer.decode_stream(ids()))
    assert first.startswith("a")
    assert len(seen) == 0


@BOTH
@given(ids=st.lists(st.integers(0, 257)))
def test_any_ids_decode(tokenizer, ids):
    assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids)


@BOTH
def test_protocol_save_load_pickle(tokenizer, tmp_path):
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(tokenizer, StoreTokenizer)
    tokenizer.encode("warm up")
    tokenizer.save(tmp_path / "tokenizer.json")
    for other in (load_tokenizer(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert other.fingerprint == tokenizer.fingerprint
        assert other.encode(CORPUS[1]) == tokenizer.encode(CORPUS[1])
        assert (other.vocab_size, other.eos_id, other.bos_id, other.pad_id) == (
            tokenizer.vocab_size,
            tokenizer.eos_id,
            tokenizer.bos_id,
            tokenizer.pad_id,
        )
        np.testing.assert_array_equal(other.token_bytes, tokenizer.token_bytes)


@BOTH
def test_a_batch_is_its_texts(tokenizer):
    rows = tokenizer.encode_batch(CORPUS[:3])
    assert [row.tolist() for row in rows] == [tokenizer.encode(text) for text in CORPUS[:3]]


@BOTH
def test_an_unknown_id_says_so(tokenizer):
    with pytest.raises(UserError, match=rf"token id 9999: expected 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode([1, 9999])


def test_ids_are_those_of_the_library():
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(BPE._content)
    for text in CORPUS[0], "ünï ⁂ code\r\n\t", "   spaces   ":
        assert BPE.encode(text) == reference.encode(text).ids
        assert BPE.decode(BPE.encode(text)) == reference.decode(BPE.encode(text))


def test_training_is_deterministic_across_processes(run_python):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(1, 6))) for _ in range(3000)]
    here = train_bpe([" ".join(words)], 600).fingerprint
    code = f"""
        from styrax.data import train_bpe
        print(train_bpe([{" ".join(words)!r}], 600).fingerprint)
    """
    assert run_python(code, PYTHONHASHSEED="7", RAYON_NUM_THREADS="1").stdout.strip() == here


def test_decoding_imports_no_tokenizer_library(run_python, tmp_path):
    BPE.save(tmp_path / "t.json")
    ids = BPE.encode("the mat")
    code = f"""
        import sys
        from styrax.data import load_tokenizer
        assert load_tokenizer({str(tmp_path / "t.json")!r}).decode({ids}) == "the mat"
        assert "tokenizers" not in sys.modules
    """
    run_python(code)


def edited(change):
    spec = json.loads(BPE._content)
    change(spec)
    return json.dumps(spec)


def drop_byte(spec):
    del spec["model"]["vocab"]["Ġ"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.update(normalizer={"type": "NFC"}), "normalizes"),
        (lambda s: s.update(pre_tokenizer={"type": "Whitespace"}), "not byte-level"),
        (lambda s: s.update(pre_tokenizer=None), "not byte-level"),
        (lambda s: s["pre_tokenizer"].update(add_prefix_space=True), "adds a space"),
        (lambda s: s["model"].update(dropout=0.1), "at random"),
        (lambda s: s["model"].update(end_of_word_suffix="</w>"), "decorates"),
        (drop_byte, "lacks 1 of the 256"),
        (lambda s: s.update(added_tokens=[]), "ends a document.*<|endoftext|>"),
        (lambda s: s.pop("model"), "model.vocab"),
    ],
)
def test_tokenizers_that_lose_text_are_refused(tmp_path, change, reason):
    (tmp_path / "t.json").write_text(edited(change), encoding="utf-8")
    with pytest.raises(UserError, match=reason) as caught:
        load_tokenizer(tmp_path / "t.json")
    assert str(tmp_path / "t.json") in str(caught.value)


def test_all_reasons_are_listed(tmp_path):
    def change(spec):
        spec.update(normalizer={"type": "NFC"})
        spec["pre_tokenizer"].update(add_prefix_space=True)

    (tmp_path / "t.json").write_text(edited(change), encoding="utf-8")
    with pytest.raises(UserError, match=r"adds a space.*; it normalizes"):
        load_tokenizer(tmp_path / "t.json")


def test_llama_style_specials_and_split(tmp_path):
    def change(spec):
        spec["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        }
        size = len(spec["model"]["vocab"])
        base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        spec["added_tokens"] = [
            {"id": size, "content": "<|begin_of_text|>", **base},
            {"id": size + 1, "content": "<|end_of_text|>", **base},
            {"id": size + 2, "content": "    ", **base, "special": False},
        ]

    (tmp_path / "t.json").write_text(edited(change), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path / "t.json")
    size = len(json.loads(BPE._content)["model"]["vocab"])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (size, size + 1, size + 1)
    text = "if 12:\n        <|end_of_text|>"
    ids = tokenizer.encode(text)
    assert size + 2 in ids
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"type": "styrax-byte", "version": 9}'])
def test_files_that_are_no_tokenizer(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(UserError, match=r"t\.json"):
        load_tokenizer(tmp_path / "t.json")
    with pytest.raises(UserError, match="there is no tokenizer at"):
        load_tokenizer(tmp_path / "none.json")


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(UserError, match="258 or more, got 100"):
        train_bpe(["a"], 100)


@settings(max_examples=20)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_any_corpus_trains(corpus):
    tokenizer = train_bpe(corpus, 280)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in corpus] == corpus
