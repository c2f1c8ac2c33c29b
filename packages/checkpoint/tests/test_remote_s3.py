"""The same against a server that speaks S3: round trips, large objects, errors, and uploads that are killed."""

import importlib.util
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, commit
from styrax.checkpoint.manifest import FILE, Manifest, step_name
from styrax.checkpoint.remote import Bucket, BucketStore, TieredStore, errors, objects

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
WORKER = Path(__file__).with_name("remote_worker.py")


@pytest.fixture(scope="module")
def options():
    """A server with a bucket; gives what reaches it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    s3fs.S3FileSystem(**options).mkdir("bucket")
    yield options
    server.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(errors, "WAIT", 0.001)


@pytest.fixture
def url(tmp_path):
    return f"s3://bucket/{tmp_path.name}/checkpoints"


def tree(seed):
    return {"params": {"w": np.random.default_rng(seed).random(300_000, np.float32)}, "run": {"seed": seed}}


def holds(store, step, seed):
    found = store.restore(step, {"params": None, "run": None})
    assert found["run"] == {"seed": seed}
    assert found["params"]["w"].tobytes() == tree(seed)["params"]["w"].tobytes()


def test_a_run_that_moves_to_another_machine(url, options, tmp_path):
    with TieredStore(tmp_path / "a", url, CheckpointConfig(keep_last=1), storage_options=options) as store:
        for step in (1, 2, 3, 4):
            assert store.save(step, tree(step)).uploaded()
        assert (store.local.steps(), store.bucket.steps()) == ([4], [2, 3, 4])
        assert store.bucket.verify(4) == store.bucket.verify(3, mode="size") == []
        assert store.bucket.incomplete() == []
        store.save(4, tree(5)).uploaded()
    with TieredStore(tmp_path / "b", url, storage_options=options) as store:
        with pytest.warns(UserWarning, match="step 4 comes from s3://bucket"):
            assert store.latest() == 4
        holds(store, 4, seed=5)
        with pytest.warns(UserWarning, match="step 2 comes from s3://bucket"):
            holds(store, 2, seed=2)
    with BucketStore(url, storage_options=options) as store:
        store.save(5, tree(6)).committed()
        holds(store, 5, seed=6)
        assert store.steps() == [3, 4, 5]
        store.bucket.delete(3)
        assert store.steps() == [4, 5]
    plain = s3fs.S3FileSystem(**options, use_listings_cache=False)
    left = {name.split("/checkpoints/")[1].split("/")[0] for name in plain.find(url)}
    assert left == {"00000004", "00000005"}


def test_large_and_empty_objects(url, options, tmp_path, monkeypatch):
    """Large ones are sent in parts, and read in pieces."""
    monkeypatch.setattr(objects, "PIECE", 5 * 2**20)
    monkeypatch.setattr("styrax.checkpoint.remote.receiving.PIECE", 5 * 2**20)
    folder = commit.staging(tmp_path, 1)
    (folder / "aux").mkdir(parents=True)
    (folder / "aux" / "large").write_bytes(np.random.default_rng(0).bytes(17 * 2**20 + 3))
    (folder / "aux" / "empty").touch()
    commit.publish(folder, Manifest(step=1, created="", items={}, files=commit.seal(folder), writer={}))
    bucket = Bucket(url, storage_options=options)
    bucket.upload(tmp_path / "00000001", verify="readback")
    info = s3fs.S3FileSystem(**options).info(f"{url}/00000001/aux/large")
    assert info["size"] == 17 * 2**20 + 3
    assert info["ETag"].strip('"').endswith("-4"), "it was sent in four parts"
    bucket.download(1, tmp_path / "again")
    for name in ("large", "empty"):
        left, right = (tmp_path / place / "00000001" / "aux" / name for place in ("", "again"))
        assert left.read_bytes() == right.read_bytes()


def test_damaged_objects_are_refused(url, options, tmp_path):
    with TieredStore(tmp_path / "a", url, storage_options=options) as store:
        for step in (1, 2):
            assert store.save(step, tree(step)).uploaded()
    plain = s3fs.S3FileSystem(**options, use_listings_cache=False)
    names = plain.find(f"{url}/00000002")
    assert len(names) > 5
    bucket = Bucket(url, storage_options=options)
    for name in names:
        data = plain.cat_file(name)
        for bad in ([*data[:-1], data[-1] ^ 8], data[:-1], None) if data else ([7], None):
            plain.rm_file(name) if bad is None else plain.pipe_file(name, bytes(bad))
            short = name.partition("/00000002/")[2]
            assert bucket.steps() == ([1] if bad is None and short == FILE else [1, 2])
            with pytest.raises(CheckpointError, match="no checkpoint of" if short == FILE and bad is None else short):
                bucket.download(2, tmp_path / "again")
        plain.pipe_file(name, data)
    assert bucket.verify(2) == []


def test_errors_of_the_server(url, options, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot list s3://nothing/a: there is no such bucket; make it"):
        TieredStore(tmp_path / "a", "s3://nothing/a", storage_options=options)
    nobody = {"client_kwargs": options["client_kwargs"], "anon": False}
    environment = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE")
    if not any(name in os.environ for name in environment):
        with pytest.raises(CheckpointError, match=rf"cannot list {url}: no credentials were found .*AWS_PROFILE"):
            Bucket(url, storage_options=nobody).steps()
    once = {"retries": {"total_max_attempts": 1}}
    silent = {**options, "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}, "config_kwargs": once}
    with pytest.raises(CheckpointError, match=rf"cannot list {url}: the server does not answer .* 1 times in a row"):
        Bucket(url, storage_options=silent, attempts=1).steps()


@pytest.fixture(scope="module")
def worker(env):
    process = subprocess.Popen(
        [sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(timeout=30)


@pytest.fixture(scope="module")
def worker_items():
    spec = importlib.util.spec_from_file_location("checkpoint_remote_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.items


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_uploads_that_are_killed(kills, url, options, tmp_path, worker, worker_items):
    """What was acknowledged is in the bucket, and nothing half is listed; some runs go on in the same folder."""
    draw, output, acks, safe = random.Random(kills), tmp_path / "output", tmp_path / "acks", 0
    bucket = Bucket(url, storage_options=options)
    for number in range(kills):
        directory = tmp_path / f"run-{number // 2}"
        acks.unlink(missing_ok=True)
        task = {"directory": str(directory), "url": url, "options": options, "acks": str(acks), "output": str(output)}
        worker.stdin.write(json.dumps(task) + "\n")
        worker.stdin.flush()
        pid = int(worker.stdout.readline())
        deadline = time.monotonic() + 60
        while number % 3 < 2 and not (acks.exists() and acks.read_text()) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.6))
        os.kill(pid, signal.SIGKILL)
        assert int(worker.stdout.readline()) == -signal.SIGKILL, output.read_text()
        acked = [int(line) for line in acks.read_text().split()] if acks.exists() else []
        safe += len(acked)
        steps = bucket.steps()
        assert set(acked[-3:]) - set(steps) <= {step for step in acked if step <= max(steps, default=0) - 3}
        for step in steps:
            assert bucket.verify(step) == []
        if steps:
            reader = BucketStore(url, storage_options=options, read_only=True)
            found = reader.restore(steps[-1], {"params": None, "run": None})
            expected = worker_items(steps[-1])
            assert found["run"] == expected["run"]
            assert found["params"]["w"].tobytes() == expected["params"]["w"].tobytes()
    assert safe >= kills // 2, output.read_text()
    # What the killed ones left is found, and swept when it is old enough.
    before = bucket.steps()
    assert set(bucket.incomplete()) == set(bucket.sweep(older_than=-1.0))
    assert (bucket.incomplete(), bucket.steps()) == ([], before)
    assert step_name(before[-1]) in "".join(s3fs.S3FileSystem(**options).find(url))
