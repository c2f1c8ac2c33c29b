"""The power goes at any moment: what a disk may hold then is worked out from a log of all operations, and opened.

A disk holds what was synced, and of the rest anything: a file's bytes count from `sync_file` on, the entries of a
folder (files made, renamed and removed there) from its `sync_folder` on. Orbax's own files are taken as never
synced by Orbax.
"""

import itertools
import random
import shutil
import threading

import numpy as np
import pytest

from styrax.checkpoint import CheckpointConfig, CheckpointError, storage

SAVES = [(1, 1), (2, 2), (2, 3), (3, 4), (4, 5)]  # step and generation: new, in the old one's place, retention
KEEP = 2
KINDS = {
    "packed": {"pack_below": 2**30},
    "files": {"pack_below": 128},
    "shared": {"pack_below": 128, "profile": "shared"},
}


def items(generation):
    return {
        "params": {"large": np.full(64, generation, np.float32), "small": np.full(3, generation)},
        "run": {"generation": generation},
    }


class Killed(BaseException):
    """The process ends here."""


class Disk:
    """A log of what was done to a folder, from which what a disk may hold can be told.

    Args:
        root: The folder; its own name is on the disk.
        kill_at: The number of the operation at which the process is killed.
    """

    def __init__(self, root, kill_at=None):
        self.root, self.kill_at, self.operations, self.dead = root, kill_at, 0, False
        self.events = []  # ("entry", folder, name, inode or None), ("rename", folder, old, new, inode), ...
        self.folders = {0: {}}  # as they are now: number -> name -> number
        self.bytes = {}
        self.numbers = itertools.count(1)
        self.lock = threading.RLock()

    def watch(self, patch, without=()):
        """Log every operation from now on; those in `without` do nothing, as if they had been forgotten."""
        for name in ("make_folder", "make_file", "sync_file", "sync_folder", "rename", "remove_file", "remove_folder"):
            real, log = getattr(storage, name), getattr(self, name)

            def operation(path, *args, name=name, real=real, log=log, **options):
                with self.lock:
                    if not path.is_relative_to(self.root):
                        return real(path, *args, **options)
                    if self.dead or self.operations == self.kill_at:
                        self.dead = True
                        raise Killed
                    self.operations += 1
                    return None if name in without else log(real, path, *args, **options)

            patch.setattr(storage, name, operation)

    def revive(self):
        self.dead, self.kill_at = False, None

    def make_folder(self, real, path):
        real(path)
        self.enter(path)

    def make_file(self, real, path, data, *, sync=False):
        real(path, data)
        self.look(path)
        if sync:
            storage.sync_file(path)

    def sync_file(self, real, path):
        self.events.append(("synced", self.look(path)))

    def sync_folder(self, real, path):
        for entry in sorted(path.iterdir()):
            if entry.name != "LOCK":
                self.look(entry)
        self.events.append(("synced", self.enter(path)))

    def rename(self, real, path, target):
        for each in sorted(path.rglob("*")):
            self.look(each)
        parent = self.enter(path.parent)
        number = self.folders[parent].pop(path.name)
        self.folders[parent][target.name] = number
        self.events.append(("rename", parent, path.name, target.name, number))
        real(path, target)

    def remove_file(self, real, path):
        real(path)
        parent = self.enter(path.parent)
        self.folders[parent].pop(path.name, None)
        self.events.append(("entry", parent, path.name, None))

    remove_folder = remove_file

    def enter(self, path, file=False):
        """Give the number of a file or folder, and log that it was made if that was not known."""
        if path == self.root:
            return 0
        parent = self.enter(path.parent)
        number = self.folders[parent].get(path.name)
        if number is None:
            number = self.folders[parent][path.name] = next(self.numbers)
            (self.bytes if file else self.folders)[number] = b"" if file else {}
            self.events.append(("entry", parent, path.name, number))
        return number

    def look(self, path):
        """Log what somebody else wrote."""
        file = not path.is_dir()
        number = self.enter(path, file)
        if file and (data := path.read_bytes()) != self.bytes[number]:
            self.bytes[number] = data
            self.events.append(("bytes", number, data))
        return number

    def left(self, length, choose):
        """Give what the disk holds when the power goes after so many events.

        Args:
            length: How many.
            choose: Called for each change that was not synced: whether the disk has it; for bytes, gives them.

        Returns:
            Path -> bytes, or None for a folder.
        """
        synced, durable = set(), []
        for event in reversed(self.events[:length]):
            if event[0] == "synced":
                synced.add(event[1])
            elif event[0] != "ack":
                durable.append((event, event[1] in synced))
        folders, contents = {}, {}
        for event, safe in reversed(durable):
            if event[0] == "bytes":
                contents[event[1]] = event[2] if safe else choose(event)
            elif not safe and not choose(event):
                continue
            elif event[0] == "rename":
                _, parent, old, new, number = event
                folders.setdefault(parent, {}).pop(old, None)
                folders[parent][new] = number
            else:
                _, parent, name, number = event
                folders.setdefault(parent, {})[name] = number
                if number is None:
                    del folders[parent][name]
        return dict(self._tree(0, "", folders, contents))

    def _tree(self, number, path, folders, contents):
        for name, child in sorted(folders.get(number, {}).items()):
            if child in self.bytes:
                yield path + name, contents.get(child, b"")
            else:
                yield path + name, None
                yield from self._tree(child, f"{path}{name}/", folders, contents)


def nothing(event):
    return b"" if event[0] == "bytes" else False


def names_only(event):
    return b"" if event[0] == "bytes" else True


def zeros(event):
    return bytes(len(event[2])) if event[0] == "bytes" else True


def everything(event):
    return event[2] if event[0] == "bytes" else True


def renames_last(event):
    return event[2] if event[0] == "bytes" else event[1] != 0


def some(draw):
    def choose(event):
        if event[0] != "bytes":
            return draw.random() < 0.5
        data, where = event[2], draw.randint(0, len(event[2]))
        return draw.choice([b"", bytes(len(data)), data[:where], data[:where] + bytes(len(data) - where), data])

    return choose


def kept(saves):
    steps = sorted({step for step, _ in saves})
    return {*steps[-KEEP:], *(step for step, _ in saves[-1:])}


def required(events):
    """Give step -> the generation that must be there, or a later one: acknowledged, and kept by the save after it."""
    count = sum(event[0] == "ack" for event in events)
    now, then = SAVES[:count], SAVES[: count + 1]
    newest = dict(now)
    return {step: newest[step] for step in kept(now) & kept(then)} if now else {}


def violations(tree, wanted, directory, options):
    """Open what is left as the next run does, and say what is not as it must be."""
    directory.mkdir()
    for path, data in tree.items():
        if data is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(data)
    found, wrong = {}, []
    try:
        with CheckpointConfig(keep_last=KEEP, **options).build(directory) as store:
            wrong += [f"{path.name} is left" for path in directory.glob(".*")]
            for step in store.steps():
                problems = store.verify(step)
                if problems:
                    wrong.append(f"step {step} is listed and damaged: {problems}")
                    continue
                got = store.restore(step, {"params": None, "run": None})
                generation = got["run"]["generation"]
                if {*got["params"]["large"], *got["params"]["small"]} != {generation}:
                    wrong.append(f"step {step} is not what was saved: {got}")
                if (step, generation) not in SAVES:
                    wrong.append(f"step {step} is generation {generation}")
                found[step] = generation
            if not wrong and store.latest() != max(found, default=None):
                wrong.append(f"the latest is {store.latest()} of {found}")
    except CheckpointError as error:
        wrong.append(str(error))
    wrong += [f"step {step} is lost, or old: {found}" for step, least in wanted.items() if found.get(step, 0) < least]
    shutil.rmtree(directory)
    return wrong


def run(root, patch, options, kill_at=None, without=()):
    """Save everything, killed at an operation if that is told; gives the log, and where the next run began in it."""
    root.mkdir()
    disk = Disk(root, kill_at)
    disk.watch(patch, without)
    config = CheckpointConfig(keep_last=KEEP, async_save=kill_at is None, **options)
    store, begun = config.build(root), None
    try:
        for step, generation in SAVES:
            store.save(step, items(generation)).committed()
            disk.events.append(("ack",))
    except Killed:
        begun = len(disk.events)
        disk.revive()
        store.close()
        config.build(root).close()
    else:
        store.close()
    return disk, begun


def search(disk, lengths, choices, directory, options, enough=2**30):
    """Open every different state of the disk; gives how many there were, and what is wrong with them."""
    seen, wrong = set(), []
    for length in lengths:
        wanted = required(disk.events[:length])
        for choose in choices:
            tree = disk.left(length, choose)
            key = hash((tuple(tree.items()), tuple(sorted(wanted.items()))))
            if key not in seen:
                seen.add(key)
                wrong += [f"{length}: {text}" for text in violations(tree, wanted, directory, options)]
            if len(wrong) >= enough:
                return len(seen), wrong
    return len(seen), wrong


FIXED = [nothing, names_only, zeros, renames_last, everything]


def test_what_was_synced_is_there(tmp_path, monkeypatch):
    disk, _ = run(tmp_path / "run", monkeypatch, KINDS["packed"])
    count, wrong = search(
        disk, range(len(disk.events) + 1), [*FIXED, some(random.Random(0))], tmp_path / "disk", KINDS["packed"]
    )
    assert not wrong and count > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_state_of_the_disk(kind, tmp_path, monkeypatch):
    disk, _ = run(tmp_path / "run", monkeypatch, KINDS[kind])
    draws = [some(random.Random(seed)) for seed in range(2 if kind == "shared" else 4)]
    lengths = range(0, len(disk.events) + 1, 3 if kind == "shared" else 1)
    count, wrong = search(disk, lengths, [*FIXED, *draws], tmp_path / "disk", KINDS[kind])
    assert not wrong and count > 100


def killed_and_cut(tmp_path, monkeypatch, options, numbers, choices):
    total = 0
    for kill_at in numbers:
        with monkeypatch.context() as patch:
            disk, begun = run(tmp_path / f"run{kill_at}", patch, options, kill_at)
        if begun is None:
            assert kill_at > 60
            break
        count, wrong = search(disk, range(begun, len(disk.events) + 1), choices, tmp_path / "disk", options)
        assert not wrong, f"killed at operation {kill_at}"
        total += count
    return total


def test_killed_then_put_in_order_then_the_power_goes(tmp_path, monkeypatch):
    """A process killed between a rename and its sync leaves what looks done to the next one, and is not."""
    with monkeypatch.context() as patch:
        disk, _ = run(tmp_path / "all", patch, KINDS["packed"])
    replacing = range(disk.operations // 3, disk.operations // 2 + 4)
    assert killed_and_cut(tmp_path, monkeypatch, KINDS["packed"], replacing, [renames_last]) > 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "files"])
def test_killed_anywhere_then_the_power_goes(kind, tmp_path, monkeypatch):
    choices = [renames_last, some(random.Random(1)), *([] if kind == "files" else [nothing, some(random.Random(2))])]
    assert killed_and_cut(tmp_path, monkeypatch, KINDS[kind], itertools.count(), choices) > 300


@pytest.mark.parametrize("forgotten", ["sync_file", "sync_folder"])
def test_the_search_finds_a_sync_that_is_forgotten(forgotten, tmp_path, monkeypatch):
    disk, _ = run(tmp_path / "run", monkeypatch, KINDS["packed"], without=(forgotten,))
    lengths = range(0, len(disk.events) + 1, 2)
    assert search(disk, lengths, FIXED, tmp_path / "disk", KINDS["packed"], enough=1)[1]
