import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data.build import decontaminate as module
from styrax.data.build.decontaminate import Decontaminator

EVAL = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def slow_words(text):
    return "".join(char if char.isalnum() or char == "_" else " " for char in text.casefold()).split()


def slow_hits(text, held, n):
    """All held runs as word tuples, and a walk over the document."""
    runs = set()
    for found in map(slow_words, held):
        runs |= {tuple(found[i : i + n]) for i in range(len(found) - n + 1)} if len(found) >= n else {tuple(found)}
    own = slow_words(text)
    hits = [" ".join(own[i : i + m]) for i in range(len(own)) for m in range(1, n + 1) if tuple(own[i : i + m]) in runs]
    return list(dict.fromkeys(hits))


sentences = st.lists(st.sampled_from(["a", "B", "b,", "Straße", "cc", "!", "1"]), max_size=12).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(sentences, st.lists(sentences, min_size=1, max_size=5), st.integers(1, 6))
def test_hits_equal_the_slow_ones(text, held, n):
    if not any(map(slow_words, held)):
        with pytest.raises(UserError, match="nothing to look for"):
            Decontaminator(held, ngram=n)
        return
    assert Decontaminator(held, ngram=n).hits(text) == slow_hits(text, held, n)


@given(sentences, st.lists(sentences, min_size=1, max_size=5))
@settings(deadline=None)
def test_equal_hashes_give_no_false_hits(text, held):
    held = [*held, "a b"]
    with pytest.MonkeyPatch.context() as patch:
        true_hash = module.hash_runs
        patch.setattr(module, "hash_runs", lambda hashes, n: true_hash(hashes, n) & np.uint64(1))
        got = Decontaminator(held, ngram=3).hits(text)
    assert set(got) <= set(slow_hits(text, held, 3))


def test_a_run_that_begins_like_a_held_one():
    held = Decontaminator(["one two", "six seven eight"], ngram=2)
    assert held.hits("One twofold; bone two; ONE TWO!") == ["one two"]
    assert held.hits("two six") == []
    assert held.hits("seven, eight nine; six seven") == ["seven eight", "six seven"]


def test_thirteen_words_in_a_document():
    held = Decontaminator([EVAL])
    copied = " ".join(EVAL.split()[3:16])
    assert held.num_ngrams == 20 - 13 + 1
    assert held.hits(f"some other text, {copied.upper()}\n\nmore") == [" ".join(slow_words(copied))]
    assert held.hits(f"some other text, {copied.replace('friends', 'foes')} more") == []
    assert held.hits("") == held.hits("short") == []
    whole = held.hits(f"{EVAL} {EVAL}")
    assert whole == [" ".join(slow_words(EVAL)[i : i + 13]) for i in range(8)]


def test_short_texts_are_matched_as_a_whole():
    held = Decontaminator(["capital of France", EVAL, "Paris", "..."], ngram=13)
    assert held.hits("The capital of France is Paris. Capital of Spain.") == ["capital of france", "paris"]
    assert held.num_left_out == 1
    held = Decontaminator(["capital of France", EVAL, "Paris", "..."], ngram=13, shortest=3)
    assert held.hits("The capital of France is Paris.") == ["capital of france"]
    assert held.num_left_out == 2
    with pytest.raises(UserError, match="none of 2 held-out texts has 3 words"):
        Decontaminator(["Paris", "London"], shortest=3)


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("one two\nthree four\n", encoding="utf-8")
    lines = [{"q": "five six\u2028seven", "id": 1}, {"q": "Größe acht"}]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "b.jsonl").write_text(text + "\n\n", encoding="utf-8", newline="")
    held = Decontaminator.from_files([tmp_path / "a.txt", str(tmp_path / "b.jsonl")], ngram=3, text="q")
    texts = ["Größe acht", "one two three four", "five six seven"]
    assert held.settings == Decontaminator(texts, ngram=3).settings
    assert held.hits("two three four, five six seven grösse acht") == [
        "two three four",
        "five six seven",
        "grösse acht",
    ]


def test_all_problems_of_files_at_once(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n{"txt": "x", "n": 1}\n[1]\n{"text": 3}\n{"te\n')
    (tmp_path / "c.json").write_text("{}")
    paths = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.json", "d.txt")]
    with pytest.raises(UserError) as caught:
        Decontaminator.from_files(paths)
    message = str(caught.value)
    for part in (
        "a.txt is not UTF-8 at byte offset 2",
        "b.jsonl:2: has no field 'text' (did you mean 'txt'?); its fields: 'txt', 'n'",
        "b.jsonl:3: expected a JSON object, got list",
        "b.jsonl:4: expected text in 'text', got int",
        "b.jsonl:5: expected JSON, got",
        "c.json: expected a .txt file",
        "d.txt: No such file",
    ):
        assert part in message
    (tmp_path / "b.jsonl").write_text("{}\n" * 30)
    with pytest.raises(UserError, match="and 20 more"):
        Decontaminator.from_files([tmp_path / "b.jsonl"])


def test_wrong_numbers():
    with pytest.raises(UserError, match=r"ngram = 0: expected 1 or more\n.*shortest = -1"):
        Decontaminator(["a"], ngram=0, shortest=-1)
    with pytest.raises(UserError, match="nothing to look for: none of 0"):
        Decontaminator.from_files([])


def test_settings_tell_what_is_held():
    one = Decontaminator([EVAL, "a b"])
    assert json.loads(json.dumps(one.settings)) == one.settings
    assert one.settings == Decontaminator(["A, b!", EVAL, EVAL]).settings
    others = [Decontaminator([EVAL]), Decontaminator([EVAL, "a b"], ngram=12), Decontaminator([EVAL, "a", "b"])]
    assert one.settings not in [other.settings for other in others]
    assert one.settings["held"] == "d5c0301c4deaf07bcb5e2ee1952cc707"  # for ever


def test_it_is_small_to_send():
    rng = np.random.default_rng(0)
    texts = [" ".join(f"word{i}" for i in rng.integers(0, 5000, 50)) for _ in range(400)]
    held = Decontaminator(texts)
    content = pickle.dumps(held)
    assert len(content) < 25 * 50 * 400
    assert pickle.loads(content).hits(texts[7]) == held.hits(texts[7]) != []
    assert len(pickle.dumps(held)) == len(content)
