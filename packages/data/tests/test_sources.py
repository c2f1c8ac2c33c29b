import io
import os
import sys
import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.data import find_documents
from styrax.data.build.quarantine import Refused
from styrax.data.build.readers.text import decode, split_text


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md", ".hidden", ".git/config"):
        (folder / name).write_text(name * 10)
    return folder


def ids(*sources, **options):
    return [document.id for document in find_documents([str(source) for source in sources], **options)]


def test_folders_files_globs(corpus, monkeypatch):
    everything = ["corpus/a.txt", "corpus/b.txt", "corpus/sub/c.txt", "corpus/sub/d.md"]
    assert ids(corpus) == everything
    assert ids(corpus / "b.txt") == ["b.txt"]
    assert ids(f"{corpus}/**/*.txt") == ["corpus/a.txt", "corpus/b.txt", "corpus/sub/c.txt"]
    assert ids(f"{corpus}/*.txt") == ["corpus/a.txt", "corpus/b.txt"]
    monkeypatch.chdir(corpus)
    assert ids(".") == everything
    assert ids("sub/*") == ["sub/c.txt", "sub/d.md"]


def test_each_file_once_and_equal_names_told_apart(corpus, tmp_path):
    assert ids(corpus, f"{corpus}/*.txt") == ids(corpus)
    other = tmp_path / "other" / "corpus"
    other.mkdir(parents=True)
    (other / "a.txt").write_text("another")
    assert ids(corpus, other)[:2] == ["corpus/a.txt", "corpus/a.txt@2"]


def test_all_problems_in_one_message(corpus, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError) as caught:
        find_documents([str(corpus / "a.tx"), str(empty), f"{corpus}/*.csv", "python:stdlb", str(corpus)])
    message = str(caught.value)
    assert "a.tx: does not exist (did you mean 'a.txt'?)" in message
    assert "empty: a folder without files" in message
    assert "*.csv: no file matches" in message
    assert "python:stdlb: not a known source (did you mean 'python:stdlib'?)" in message
    with pytest.raises(UserError, match="no source was given"):
        find_documents([])


def test_a_subset_is_whole_files_below_a_size(corpus):
    documents = find_documents([corpus])
    assert find_documents([corpus], max_bytes=10**6) == documents
    subset = find_documents([corpus], max_bytes=120)
    assert 0 < len(subset) < 4
    assert sum(document.size for document in subset) <= 120
    assert subset == sorted(subset, key=lambda document: document.id)
    with pytest.raises(UserError, match="max_bytes = 3 leaves no document; the smallest file has 50 bytes"):
        find_documents([corpus], max_bytes=3)


def test_malformed_text_names_file_and_offset():
    content = "né".encode() + b"\xff\xfe rest"
    refused = decode(content, "x", "/there/x.txt", "raise", start=100)
    assert isinstance(refused, Refused)
    with pytest.raises(UserError, match=r"/there/x\.txt is not UTF-8 at byte offset 103: .*ff fe"):
        raise refused.error()
    assert decode(content, "x", "x", "replace") == "né\ufffd\ufffd rest"
    assert decode(content, "x", "x", "skip").quiet


def test_line_ends_and_byte_order_marks_stay():
    content = "\ufeffa\r\nb\rc\n".encode()
    assert decode(content, "x", "x", "raise").encode() == content


@pytest.mark.skipif(sys.platform == "win32" or os.name == "nt", reason="POSIX names")
def test_names_that_are_no_unicode(tmp_path):
    folder = os.fsencode(tmp_path)
    try:
        with open(folder + b"/\xff.txt", "wb") as handle:  # noqa: PTH123
            handle.write(b"x")
    except OSError:
        pytest.skip("this file system has Unicode names only")
    assert ids(f"{tmp_path}/*.txt")[0].endswith("/\\xff.txt")


def test_the_standard_library():
    documents = find_documents(["python:stdlib"])
    names = [document.id for document in documents]
    assert names == sorted(names)
    assert "python:stdlib/json/decoder.py" in names
    assert not any(part in name.split("/") for name in names for part in ("test", "tests", "site-packages"))
    assert all(str(document.path).startswith(sysconfig.get_path("stdlib")) for document in documents)
    assert 5e6 < sum(document.size for document in documents) < 40e6


@given(st.text(alphabet="abé-\n"), st.sampled_from(["\n", "--", "a", "é\n", "aa"]), st.integers(1, 5))
def test_pieces_joined_are_the_text(text, separator, chunk):
    pieces = list(split_text(io.BytesIO(text.encode()), separator, chunk))
    assert b"".join(piece for _, piece in pieces).decode() == text
    # As `str.split` cuts, whatever the size of what is read at a time.
    *whole, rest = text.split(separator)
    assert [piece.decode() for _, piece in pieces] == [part + separator for part in whole] + ([rest] if rest else [])
    sizes = [len(piece) for _, piece in pieces]
    assert [start for start, _ in pieces] == [sum(sizes[:i]) for i in range(len(sizes))]
