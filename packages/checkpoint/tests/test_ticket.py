"""What a save gives back, and what happens to one that is asked for while another goes on."""

import errno
import logging
import threading

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, Store, Ticket, commit


def items(step):
    return {"params": {"w": np.full(4, step)}}


@pytest.fixture
def gate(monkeypatch):
    """Holds back every save until it is opened."""
    opened, real = threading.Event(), commit.seal

    def seal(*args, **kwargs):
        assert opened.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(commit, "seal", seal)
    yield opened
    opened.set()


def broken(monkeypatch):
    def seal(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commit, "seal", seal)


def test_a_ticket(tmp_path, gate):
    with Store(tmp_path) as store:
        ticket = store.save(3, items(3))
        assert isinstance(ticket, Ticket) and ticket.step == 3 and not ticket.skipped
        ticket.staged()
        assert not ticket.done and store.steps() == []
        for timeout in (0.01, 0):
            with pytest.raises(CheckpointError, match=r"step 3 is not written after .* s; it goes on, ask again"):
                ticket.committed(timeout)
        assert not ticket.done
        gate.set()
        ticket.committed(30)
        assert ticket.done and store.steps() == [3]
        ticket.committed()
        ticket.committed(0)


def test_a_synchronous_save_is_done(tmp_path):
    with CheckpointConfig(async_save=False).build(tmp_path) as store:
        ticket = store.save(1, items(1))
        assert ticket.done and store.steps() == [1]
        ticket.committed(0)


def test_an_error_is_told_once(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        broken(monkeypatch)
        ticket = store.save(1, items(1))
        with pytest.raises(CheckpointError, match=r"step 1 cannot be written .*no space is left"):
            ticket.committed()
        assert ticket.done
        store.wait()
        # Told by the next call, it is not told by the ticket; but the ticket must not say that all is well.
        ticket = store.save(2, items(2))
        with pytest.raises(CheckpointError, match="step 2 cannot be written"):
            store.save(3, items(3))
        monkeypatch.undo()
        store.save(4, items(4)).committed()
        assert store.steps() == [4]


def test_a_ticket_never_says_that_a_failed_save_is_committed(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        broken(monkeypatch)
        ticket = store.save(1, items(1))
        with pytest.raises(CheckpointError):
            store.wait()
        with pytest.raises(CheckpointError, match="step 1"):
            ticket.committed()
        with pytest.raises(CheckpointError, match="step 1"):
            ticket.committed()


def test_the_end_of_with_tells(tmp_path, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(CheckpointError, match="step 1 cannot be written"), Store(tmp_path) as store:
        store.save(1, items(1))
    with Store(tmp_path) as store:  # the lock is free
        assert store.steps() == []


def test_busy_wait(tmp_path, gate):
    with CheckpointConfig(keep_last=9).build(tmp_path) as store:
        store.save(1, items(1))
        threading.Timer(0.1, gate.set).start()
        tickets = [store.save(step, items(step)) for step in (2, 3)]
        for ticket in tickets:
            ticket.committed()
        assert store.steps() == [1, 2, 3]


def test_busy_error(tmp_path, gate):
    with CheckpointConfig(on_busy="error").build(tmp_path) as store:
        first = store.save(1, items(1))
        with pytest.raises(CheckpointError, match=r"step 2 cannot be saved while another save goes on"):
            store.save(2, items(2))
        gate.set()
        first.committed()
        store.save(2, items(2)).committed()
        assert store.steps() == [1, 2]


def test_busy_skip(tmp_path, gate, caplog):
    with CheckpointConfig(on_busy="skip").build(tmp_path) as store:
        first = store.save(1, items(1))
        with caplog.at_level(logging.WARNING):
            ticket = store.save(2, items(2))
        assert "the checkpoint of step 2 is skipped: another save goes on" in caplog.text
        assert ticket.skipped and ticket.done and ticket.step == 2
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"step 2 was skipped \(on_busy\)"):
                ticket.committed()
        gate.set()
        first.committed()
        assert not store.save(3, items(3)).skipped
        store.wait()
        assert store.steps() == [1, 3]


@pytest.mark.parametrize("on_busy", ["error", "skip"])
def test_a_failed_save_is_told_by_the_next_one_whatever_the_policy(on_busy, tmp_path, monkeypatch):
    with CheckpointConfig(on_busy=on_busy).build(tmp_path) as store:
        broken(monkeypatch)
        ticket = store.save(1, items(1))
        while not ticket.done:
            pass
        with pytest.raises(CheckpointError, match="step 1 cannot be written"):
            store.save(2, items(2))


def test_bad_policy():
    with pytest.raises(ValueError, match=r"on_busy.*wait.*error.*skip"):
        CheckpointConfig(on_busy="skp")
