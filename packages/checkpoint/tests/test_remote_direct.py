"""Arrays read from a bucket by parts: into any layout, from any layout, with every part that is read verified."""

import importlib.util
import shutil

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError
from styrax.checkpoint.errors import Damaged
from styrax.checkpoint.remote import Bucket

pytest.importorskip("fsspec")
direct = pytest.importorskip("styrax.checkpoint.remote.direct")
jax = pytest.importorskip("jax")
P = jax.sharding.PartitionSpec

SHAPE = (8, 24)


def sharding(*axes, devices=8, names=("x", "y")):
    shape = (devices // 2, 2) if devices > 1 else (1, 1)
    return jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), names), P(*axes)
    )


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return {
        "rows.of": rng.random(SHAPE, np.float32),
        "both": rng.integers(0, 2**31, SHAPE, np.int32),
        "uneven/3": rng.random((6, 4), np.float32),
        "copied": rng.random(SHAPE, np.float32),
        "host": rng.random((3, 5)),
        "small": np.arange(3, dtype=np.int8),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.array(4, np.float32),
    }


@pytest.fixture(scope="module")
def place(arrays, tmp_path_factory):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    folder = tmp_path_factory.mktemp("direct")
    laid = {"rows.of": sharding("x"), "both": sharding("x", "y"), "uneven/3": sharding("y"), "copied": sharding()}
    params = {path: jax.device_put(value, laid[path]) if path in laid else value for path, value in arrays.items()}
    config = CheckpointConfig(pack_below=60, compress=("zipped",))
    with config.build(folder / "here") as store:
        store.save(3, {"params": params, "zipped": {"w": arrays["host"]}, "run": {"a": 1}, "state": {"n": np.int32(1)}})
    Bucket(f"file://{folder}/there").upload(folder / "here" / "00000003")
    return folder / "there"


@pytest.fixture
def bucket(place):
    return Bucket(f"file://{place}")


def test_everything_as_numpy(bucket, arrays):
    found = bucket.read_arrays(3, "params")
    assert found.keys() == arrays.keys()
    for path, value in arrays.items():
        assert type(found[path]) is np.ndarray
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape)
        assert found[path].tobytes() == value.tobytes()
    np.testing.assert_array_equal(bucket.read_arrays(3, "zipped")["w"], arrays["host"])


@pytest.mark.parametrize("axes", [("x",), ("x", "y"), ("y", "x"), (), (("x", "y"),), (None, "y")], ids=str)
@pytest.mark.parametrize("devices", [8, 2, 1])
def test_into_any_layout(axes, devices, bucket, arrays):
    wanted = sharding(*axes, devices=devices)
    names = [path for path, value in arrays.items() if value.shape == SHAPE]
    numpy = {path: value for path, value in arrays.items() if path not in names}
    like = {path: jax.ShapeDtypeStruct(SHAPE, arrays[path].dtype, sharding=wanted) for path in names}
    found = bucket.read_arrays(3, "params", like | numpy)
    for path in names:
        assert found[path].sharding == wanted
        assert np.asarray(found[path]).tobytes() == arrays[path].tobytes()


def test_only_the_parts_that_are_needed_are_read(bucket, arrays, monkeypatch):
    manifest, parts = bucket.manifest(3), []
    leaf = next(leaf for leaf in manifest.items["params"].leaves if leaf.path == "rows.of")
    assert len(leaf.shards) == 4

    def part(box):
        parts.append(box)
        return arrays["rows.of"][tuple(slice(*bounds) for bounds in box)]

    got = direct._assemble(leaf, {((2, 4), (0, 24))}, part, "rows.of")
    assert parts == [((2, 4), (0, 24))]
    np.testing.assert_array_equal(got[((2, 4), (0, 24))], arrays["rows.of"][2:4])
    got = direct._assemble(leaf, {((3, 5), (6, 12))}, part, "rows.of")
    assert parts[1:] == [((2, 4), (0, 24)), ((4, 6), (0, 24))]
    np.testing.assert_array_equal(got[((3, 5), (6, 12))], arrays["rows.of"][3:5, 6:12])


def test_damage_is_found(place, arrays, tmp_path):
    """Whatever byte of whatever file is changed: an error, or the right values."""
    rng, refused = np.random.default_rng(0), 0
    files = [path.relative_to(place) for path in place.rglob("*") if path.is_file() and path.stat().st_size]
    for file in [file for file in files if file.name != "MANIFEST.json"] * 2:
        shutil.copytree(place, tmp_path / "there", dirs_exist_ok=True)
        path = tmp_path / "there" / file
        data = bytearray(path.read_bytes())
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        try:
            found = Bucket(f"file://{tmp_path}/there").read_arrays(3, "params")
        except CheckpointError:
            refused += 1
            continue
        for name, value in arrays.items():
            assert found[name].tobytes() == value.tobytes(), file
    assert refused >= 3
    shutil.rmtree(tmp_path / "there")
    shutil.copytree(place, tmp_path / "there")
    path = tmp_path / "there" / "00000003" / "aux" / "leaves.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(Damaged, match=r"params/\w+ of step 3 in file://.* is not what was saved: digest"):
        Bucket(f"file://{tmp_path}/there").read_arrays(3, "params")


def test_what_does_not_fit_is_told_at_once(bucket, arrays):
    with pytest.raises(CheckpointError, match=r"item 'parms' is no tree .* \(did you mean 'params'\?\); of"):
        bucket.read_arrays(3, "parms")
    with pytest.raises(CheckpointError, match="item 'run' is no tree of arrays"):
        bucket.read_arrays(3, "run")
    with pytest.raises(CheckpointError, match="state/n: is a scalar value; download"):
        bucket.read_arrays(3, "state")
    like = {**arrays, "both": np.zeros((4, 48), np.int32), "extra": np.zeros(3), "small": 3}
    del like["host"]
    with pytest.raises(CheckpointError) as caught:
        bucket.read_arrays(3, "params", like)
    for text in (
        "host: in the",
        "extra: missing",
        r"both: int32[8, 24] in the checkpoint, int32[4, 48]",
        "small: int does",
    ):
        assert text in str(caught.value)
    memory = Bucket("memory://runs/direct")
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        memory.read_arrays(3, "params")


def test_where_a_url_is(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    plain = {"driver": "s3", "bucket": "b", "path": "r/c/"}
    assert direct.kvstore("s3://b/r/c", {}) == plain
    assert direct.kvstore("s3://b/r/c", {"profile": "me"}) == {
        **plain,
        "aws_credentials": {"type": "profile", "profile": "me"},
    }
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other")
    assert direct.kvstore("s3://b/r/c", {}) == {**plain, "endpoint": "http://other", "aws_region": "us-east-1"}
    with pytest.raises(CheckpointError, match="keys in storage_options are of no use to TensorStore"):
        direct.kvstore("s3://b/r/c", {"key": "k", "secret": "s"})
    with pytest.raises(CheckpointError, match="arrays cannot be read from memory:// by parts; download"):
        direct.kvstore("memory://a", {})


def test_object_storage(place, arrays, tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    assert importlib.util.find_spec("tensorstore")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        options = {"client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
        import s3fs

        s3fs.S3FileSystem(**options).mkdir("arrays")
        bucket = Bucket("s3://arrays/runs/a", storage_options=options)
        bucket.upload(place / "00000003")
        like = {path: value for path, value in arrays.items() if path != "both"}
        like["both"] = jax.ShapeDtypeStruct(SHAPE, np.int32, sharding=sharding("y"))
        found = bucket.read_arrays(3, "params", like)
        assert found["both"].sharding == like["both"].sharding
        for path, value in arrays.items():
            assert np.asarray(found[path]).tobytes() == value.tobytes()
        bucket.delete(3)
        with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
            bucket.read_arrays(3, "params")
    finally:
        server.stop()
