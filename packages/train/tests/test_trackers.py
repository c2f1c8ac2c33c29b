"""Trackers: what is written is read back, and a resumed run has each step once."""

import math
import struct
import sys
import warnings
import zlib

import pytest

from styrax.core import MeshConfig, UserError
from styrax.train.config import TrainConfig, misfits
from styrax.train.trackers.tensorboard import TensorBoardConfig, crc32c, read
from styrax.train.trackers.wandb import Wandb, WandbConfig


def test_each_step_is_read_back_as_a_float32(tmp_path):
    with TensorBoardConfig().build(tmp_path) as board:
        board.log(1, {"loss": 0.1, "held_out_loss/code": 2, "note": "x"})
        board.log(300, {"loss": math.nan, "grad_norm": 1e300})
    (first, one), (second, two) = read(tmp_path / "tensorboard")
    assert (first, second) == (1, 300)
    assert one == {"loss": struct.unpack("<f", struct.pack("<f", 0.1))[0], "held_out_loss/code": 2.0}
    assert math.isnan(two["loss"]) and two["grad_norm"] == math.inf


def test_a_resumed_run_has_each_step_once(tmp_path):
    config = TensorBoardConfig()
    with config.build(tmp_path) as board:
        for step in range(1, 8):
            board.log(step, {"loss": 1.0 / step})
    with config.build(tmp_path) as board:
        board.truncate(4)
        for step in range(5, 10):
            board.log(step, {"loss": 10.0 / step})
    found = list(read(tmp_path / "tensorboard"))
    assert [step for step, _ in found] == list(range(1, 10))
    assert found[4][1]["loss"] == pytest.approx(2.0)
    old, new = sorted((tmp_path / "tensorboard").iterdir())
    # Event(step=5, session_log=SessionLog(status=START)): a reader that has seen the old steps forgets them.
    start = b"\x10\x05" + b"\x3a\x02\x08\x01"
    assert start in new.read_bytes() and start not in old.read_bytes()


def test_a_start_that_logs_nothing_writes_nothing(tmp_path):
    with TensorBoardConfig().build(tmp_path) as board:
        board.truncate(3)
        board.flush()
    assert not (tmp_path / "tensorboard").exists()


def test_what_a_crash_cut_short_is_left_out(tmp_path):
    with TensorBoardConfig().build(tmp_path) as board:
        board.log(1, {"loss": 1.0})
        board.log(2, {"loss": 2.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert [step for step, _ in read(tmp_path / "tensorboard")] == [1]


@pytest.mark.parametrize(
    ("content", "checksum"),  # RFC 3720, B.4
    [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)],
)
def test_the_checksum_is_that_of_the_rfc(content, checksum):
    assert crc32c(content) == checksum != zlib.crc32(content)


def test_tensorboard_itself_reads_it(tmp_path):
    """With tensorboard installed: its own reader forgets what was logged after the checkpoint."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = TensorBoardConfig()
    with config.build(tmp_path) as board:
        for step in (1, 2, 3):
            board.log(step, {"loss": float(step)})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    with config.build(tmp_path) as board:
        board.truncate(1)
        board.log(2, {"loss": 20.0})
    events.Reload()  # one that had read the old file
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


class FakeWandb:
    """What is used of wandb, with its rule: a step back is dropped."""

    def __init__(self):
        self.inits, self.lines, self.finished = [], [], 0

    def init(self, **options):
        self.inits.append(options)
        return self

    def log(self, metrics, step):
        assert not self.lines or step > self.lines[-1][0]
        self.lines.append((step, metrics))

    def finish(self):
        self.finished += 1


@pytest.fixture
def mode(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_wandb_is_offline_unless_it_is_set_up(tmp_path, mode):
    seen = []
    for name, value in ((None, ""), ("WANDB_API_KEY", "k"), ("WANDB_MODE", "disabled")):
        if name:
            mode.setenv(name, value)
        fake = FakeWandb()
        tracker = Wandb(tmp_path / str(name), module=fake)
        (tmp_path / str(name)).mkdir()
        tracker.configure({"train": {"steps": 3}})
        tracker.log(1, {"loss": 1.0})
        tracker.close()
        tracker.close()
        seen.append(fake.inits[0]["mode"])
        assert fake.inits[0]["config"] == {"train": {"steps": 3}} and fake.finished == 1
    assert seen == ["offline", "online", "disabled"]


def test_wandb_keeps_one_id_and_takes_no_step_twice(tmp_path, mode):
    fake = FakeWandb()
    first = Wandb(tmp_path, module=fake)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step)})
    first.close()
    second = Wandb(tmp_path, module=fake)
    with pytest.warns(UserWarning, match="steps 2 to 3"):
        second.truncate(1)
    for step in (2, 3, 4):
        second.log(step, {"loss": float(step)})
    second.close()
    assert [step for step, _ in fake.lines] == [1, 2, 3, 4]
    assert len({options["id"] for options in fake.inits}) == 1 and len(fake.inits) == 2
    third = Wandb(tmp_path, module=fake)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third.truncate(4)
    third.close()
    assert len(fake.inits) == 2  # a start of a finished run opens none


def test_a_tracker_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'styrax-train\[wandb\]'"):
        WandbConfig().build(tmp_path)
    sections = {"train": TrainConfig(trackers=("wandb",)), "mesh": MeshConfig(), "data": None}
    (problem,) = misfits(sections)
    assert problem.startswith("train.trackers: wandb is not installed: pip install")
