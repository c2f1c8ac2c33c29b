"""Many processes, kills, two builds at once: the store is the same bytes, or there is none."""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from styrax.core import UserError
from styrax.data import ByteTokenizer, Quarantine, Records, TokenStore, build_store
from styrax.data.atomic import sweep
from styrax.data.build import pool, units
from styrax.data.cache import cached_store

FILTERS = """
import errno, multiprocessing, os, signal
from styrax.data import ByteTokenizer

def keep(record):
    return "7" not in record["text"]

def exit_at_5(record):
    if "text 5" in record["text"] and multiprocessing.parent_process():
        os._exit(3)
    return True

def killed_at_5(record):
    if "text 5" in record["text"] and multiprocessing.parent_process():
        os.kill(os.getpid(), signal.SIGKILL)
    return True

def fail_at_5(record):
    return 1 / 0 if "text 5" in record["text"] else True

class FullDisk(ByteTokenizer):
    def encode_batch(self, texts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
"""


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(units, "GROUP_BYTES", 1500)
    monkeypatch.setattr(units, "PIECE_BYTES", 1000)


@pytest.fixture
def filters(tmp_path, monkeypatch):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "filters_for_tests.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(folder)
    import filters_for_tests

    yield filters_for_tests
    del sys.modules["filters_for_tests"]


@pytest.fixture
def corpus(tmp_path):
    """Files of several kinds, some of which are cut and some put together."""
    folder, rng = tmp_path / "corpus", random.Random(3)
    folder.mkdir()
    texts = [f"text {i} " + "où " * rng.randrange(30) for i in range(150)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:60]))
    (folder / "b.csv").write_text("n,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts[60:100])))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress((json.dumps({"text": texts[100]}) + "\nbroken\n").encode()))
    for i in range(101, 150):
        (folder / f"d{i}.txt").write_text(texts[i])
    return folder


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_number_of_processes_changes_no_byte(corpus, tmp_path, filters):
    options = {"on_error": Quarantine(0.5), "dedup": "exact", "filters": [filters.keep], "tokenizer": "bpe:300"}
    made = []
    for workers in (1, 2, 3):
        store = build_store([corpus], tmp_path / f"s{workers}", workers=workers, **options)
        made.append(files(store.path))
        assert store.meta["report"]["dropped"]["refused: not JSON"] == 1
    assert made[0] == made[1] == made[2]
    assert len(store) > 100
    assert listing(tmp_path) == ["code", "corpus", "s1", "s2", "s3"]
    # However much the tokenizer is given at a time.
    assert files(build_store([corpus], tmp_path / "s", workers=1, **options).path) == made[0]


def test_records_over_processes(tmp_path):
    texts = [f"text {i} " * (i % 40) for i in range(200)]
    made = [build_store(Records(iter(texts)), tmp_path / f"s{n}", tokenizer="byte", workers=n) for n in (1, 2)]
    assert files(made[0].path) == files(made[1].path)
    assert [made[0].text(i) for i in range(len(made[0]))] == [text for text in texts if text]


def test_a_cached_store_holds_the_same(corpus, tmp_path):
    (corpus / "c.jsonl.gz").unlink()
    cached = cached_store([str(corpus)], tokenizer="bpe:300", cache_dir=tmp_path / "cache")
    assert cached.fingerprint == build_store([corpus], tmp_path / "s", tokenizer="bpe:300", workers=2).fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exit_at_5", r"ended with exit code 3 at work on .*a\.jsonl.*; what is finished is kept"),
        ("killed_at_5", r"ended with signal SIGKILL at work on .*a\.jsonl.*out of memory"),
        ("fail_at_5", r"fail_at_5 failed on record 'corpus/a\.jsonl@5': ZeroDivisionError"),
    ],
)
def test_a_worker_that_ends_is_an_error(corpus, tmp_path, filters, name, message):
    options = {"tokenizer": "byte", "on_error": Quarantine(0.5)}
    with pytest.raises(UserError, match=message):
        build_store([corpus], tmp_path / "s", workers=2, filters=[getattr(filters, name)], **options)
    assert not (tmp_path / "s").exists()


def test_what_cannot_leave_the_process(corpus, tmp_path, filters):
    (corpus / "c.jsonl.gz").unlink()
    plain = build_store([corpus], tmp_path / "s", tokenizer="byte", workers=1)

    class Local(ByteTokenizer):
        pass

    # Nothing was said of workers: then this process does it all.
    assert build_store([corpus], tmp_path / "t", tokenizer=Local()).fingerprint == plain.fingerprint
    for options in ({"tokenizer": Local()}, {"filters": [lambda record: True]}):
        with pytest.raises(UserError, match=r"cannot go to another process: .*or pass workers=1"):
            build_store([corpus], tmp_path / "u", **{"tokenizer": "byte", "workers": 2, **options})
    # Defined here, but not there.
    exec("def gone(record): return True", vars(filters))
    with pytest.raises(UserError, match=r"cannot take over the work: .*gone"):
        build_store([corpus], tmp_path / "u", tokenizer="byte", workers=2, filters=[filters.gone])


def test_a_script_without_a_guard_is_told(corpus, tmp_path, python_env):
    (corpus / "c.jsonl.gz").unlink()
    script = tmp_path / "script.py"
    code = """
        from styrax.data import build_store
        from styrax.data.build import units
        units.GROUP_BYTES = 1500
        build_store([{corpus!r}], {out!r}, tokenizer="byte", workers=2)
    """
    script.write_text(textwrap.dedent(code).format(corpus=str(corpus), out=str(tmp_path / "s")))
    done = subprocess.run([sys.executable, script], env=python_env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'call this below if __name__ == "__main__":, or pass workers=1' in done.stderr
    assert not (tmp_path / "s").exists()


def test_a_full_disk_in_a_worker(corpus, tmp_path, filters):
    (corpus / "c.jsonl.gz").unlink()
    with pytest.raises(UserError, match=r"cannot write .*/s: No space left on device .*free some space"):
        build_store([corpus], tmp_path / "s", tokenizer=filters.FullDisk(), workers=2)
    assert listing(tmp_path) == ["code", "corpus"]


def test_two_builds_at_once(corpus, tmp_path):
    (corpus / "c.jsonl.gz").unlink()
    inside, go = threading.Event(), threading.Event()

    def progress(label, done, total):
        inside.set()
        assert go.wait(30)

    options = {"tokenizer": "byte", "workers": 1}
    first = threading.Thread(
        target=build_store, args=([corpus], tmp_path / "s"), kwargs={"progress": progress, **options}
    )
    first.start()
    try:
        assert inside.wait(30)
        with pytest.raises(UserError, match=rf"s is being built by process {os.getpid()} on .*; wait for it to end"):
            build_store([corpus], tmp_path / "s", overwrite=True, **options)
    finally:
        go.set()
        first.join()
    TokenStore(tmp_path / "s").verify()
    assert listing(tmp_path) == ["corpus", "s"]


@pytest.fixture
def made(monkeypatch):
    """The keys of the parts that are made in this process."""
    keys, real = [], pool.make_part

    def make_part(job, unit, key, *rest):
        real(job, unit, key, *rest)
        keys.append(key)

    monkeypatch.setattr(pool, "make_part", make_part)
    return keys


def test_a_changed_input_is_read_again(corpus, tmp_path, made):
    options = {"tokenizer": "byte", "workers": 1}
    with pytest.raises(UserError, match=r"c\.jsonl\.gz, line 2, is not JSON(.|\n)*finished parts are kept in"):
        build_store([corpus], tmp_path / "s", **options)
    before, made[:] = set(made), []
    (corpus / "b.csv").write_text("n,text\n1,changed\n")
    (corpus / "c.jsonl.gz").unlink()
    store = build_store([corpus], tmp_path / "s", **options)
    assert not before & set(made)
    remade, made[:] = len(made), []
    fresh = build_store([corpus], tmp_path / "t", **options)
    assert files(fresh.path) == files(store.path)
    assert "changed" in [fresh.text(i) for i in range(len(fresh))]
    assert remade < len(made)
    assert before & set(made)


def test_progress_goes_from_nothing_to_all(corpus, tmp_path):
    (corpus / "c.jsonl.gz").unlink()
    total = sum(file.stat().st_size for file in corpus.iterdir())
    for workers in (1, 2):
        seen = []
        build_store(
            [corpus],
            tmp_path / f"s{workers}",
            tokenizer="byte",
            workers=workers,
            progress=lambda *event, seen=seen: seen.append(event),
        )
        done = [event[1] for event in seen if event[0] == "tokenize"]
        assert done == sorted(done)
        assert {event[2] for event in seen if event[0] == "tokenize"} == {total}
        assert done[-1] == total
        written = [event for event in seen if event[0] == "write"]
        assert written[-1][1] == written[-1][2]


def test_cores():
    assert 1 <= pool.count_cores() <= os.cpu_count()


BUILD = """
import sys
from styrax.data import Quarantine, build_store
from styrax.data.build import units

if __name__ == "__main__":
    units.GROUP_BYTES, units.PIECE_BYTES = 1500, 1000
    build_store([sys.argv[1]], sys.argv[2], tokenizer="bpe:300", workers=int(sys.argv[3]), on_error=Quarantine(0.5),
                dedup="exact", progress=lambda *event: print(*event, flush=True))
"""


def kill_and_rerun(kills, corpus, tmp_path, python_env):
    """Kill a build at random moments, and start it again, so often; then let it end."""
    script, out, rng = tmp_path / "build.py", tmp_path / "s", random.Random(kills)
    script.write_text(BUILD)
    expected = files(build_store([corpus], tmp_path / "expected", tokenizer="bpe:300", workers=1,
                                 on_error=Quarantine(0.5), dedup="exact").path)  # fmt: skip
    struck, ended = 0, False
    while struck < kills or not ended:  # the last one ends by itself, and tidies up
        workers = str(1 + struck % 3)
        command = [sys.executable, str(script), str(corpus), str(out), workers]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=python_env, text=True) as build:
            if struck < kills:
                for _ in range(rng.randrange(1, 26)):
                    build.stdout.readline()
                time.sleep(rng.random() * 0.03)
                build.send_signal(signal.SIGKILL)
            # Ends when all who can write to it have: workers do not outlive the build.
            build.communicate(timeout=60)
        struck += build.returncode == -signal.SIGKILL
        ended = build.returncode == 0
        if out.exists():
            assert files(out) == expected
            TokenStore(out).verify()
            for file in [*out.iterdir(), out]:
                file.rmdir() if file.is_dir() else file.unlink()
        else:
            assert build.returncode == -signal.SIGKILL
            with pytest.raises(UserError, match="does not exist"):
                TokenStore(out)
            for path in tmp_path.glob(".s.*"):
                # Under a name of its own there may be a whole store, about to get its name; nothing less opens.
                with contextlib.suppress(UserError):
                    TokenStore(path).verify()
                    assert {name: content for name, content in files(path).items() if name != "lock"} == expected
    assert struck >= kills
    for path in tmp_path.glob(".s.*.tmp"):  # killed before it held its lock, or after: told by age alone
        assert not (path / "lock").exists()
        os.utime(path, (0, 0))
    sweep(out)
    return listing(tmp_path)


def test_a_build_that_is_killed_goes_on(corpus, tmp_path, python_env):
    assert kill_and_rerun(3, corpus, tmp_path, python_env) == ["build.py", "corpus", "expected"]


@pytest.mark.slow
def test_a_build_that_is_killed_twenty_times_goes_on(corpus, tmp_path, python_env):
    assert kill_and_rerun(20, corpus, tmp_path, python_env) == ["build.py", "corpus", "expected"]


def test_parts_are_taken_up(corpus, tmp_path, python_env, made):
    script = tmp_path / "build.py"
    script.write_text(BUILD.replace('"bpe:300"', '"byte"').replace(', dedup="exact"', ""))
    command = [sys.executable, str(script), str(corpus), str(tmp_path / "s"), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=python_env, text=True) as build:
        for _ in range(8):
            build.stdout.readline()
        build.kill()
    parts = {path.name for path in (tmp_path / ".s.parts").iterdir() if path.name.startswith("part-")}
    assert len(parts) >= 3
    build_store([corpus], tmp_path / "s", tokenizer="byte", workers=1, on_error=Quarantine(0.5))
    assert made
    assert not {f"part-{key}" for key in made} & parts


def test_records_are_taken_up_by_their_content(tmp_path, made):
    texts = [f"text {i} " * 20 for i in range(100)]

    def breaks():
        yield from texts[:60]
        raise RuntimeError("the connection was lost")

    options = {"tokenizer": "byte", "workers": 1}
    with pytest.raises(RuntimeError, match="the connection was lost"):
        build_store(Records(breaks()), tmp_path / "s", **options)
    before, made[:] = set(made), []
    assert len(before) > 3
    store = build_store(Records(iter(texts)), tmp_path / "s", **options)
    assert made
    assert not before & set(made)
    assert [store.text(i) for i in range(100)] == texts
