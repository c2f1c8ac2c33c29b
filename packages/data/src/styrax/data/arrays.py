"""Batches of records, such as images with labels, as a pure function of source, transforms, seed and step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from styrax.core.errors import UserError
from styrax.data.hashing import fingerprint, hash64, permutation
from styrax.data.settings import changed

if TYPE_CHECKING:
    from styrax.data.loader import Loader

Record = dict[str, Any]
CONTRACT = 1
MASK = "mask"
PROBES = 8


class Records(Protocol):
    """Anything with a length and an index, such as a `grain.MapDataset`, a list, or a Hugging Face dataset."""

    def __len__(self) -> int:
        """How many records."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Give one, a mapping from name to array or number."""
        ...


class ArrayData:
    r"""Rows of records; `batch(step)` depends on nothing but the arguments here, the transforms and the step.

    Row r of step s is record $\pi_e(i)$ with $sB + r = eN + i$: epoch $e$ of $N$ records has an order $\pi_e$ of its
    own. Any random-access Grain dataset can be the source; its own `map` and `random_map` work as ever, but random
    transforms there see each record with the same numbers in every epoch. Those given to `random_map` here see
    other ones.

    Args:
        source: Arrays of one length by name, or `Records`.
        batch_size: Rows per step, over all processes.
        seed: Decides the orders and the random transforms.
        shuffle: Each epoch in an order of its own; otherwise as they come.
        max_epochs: Where the data end; then batches have an array `mask`, float32 `[batch]`, 0 for the rows that
            pad the last one. Without end by default.
        name: What the fingerprint calls the source, instead of a hash of its arrays, or of the length and of
            eight records of anything else.
        prefetch: How many batches `loader` prepares ahead by default.

    Raises:
        UserError: Arrays of different lengths, no record, numbers out of range.

    Example:
        >>> data = ArrayData({"image": np.zeros((10, 4, 4)), "label": np.arange(10)}, batch_size=4, max_epochs=1)
        >>> data = data.map(lambda record: {**record, "image": record["image"] + 1})
        >>> data = data.random_map(lambda record, rng: {**record, "shift": rng.integers(0, 3)})
        >>> batch = data.batch(2)
        >>> batch["image"].shape, batch["mask"].tolist(), data.num_steps
        ((4, 4, 4), [1.0, 1.0, 0.0, 0.0], 3)
    """

    def __init__(
        self,
        source: Mapping[str, np.ndarray] | Records,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        max_epochs: int | None = None,
        name: str | None = None,
        prefetch: int = 2,
    ):
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size}: expected 1 or more")
        if max_epochs is not None and max_epochs < 1:
            raise UserError(f"max_epochs = {max_epochs}: expected 1 or more, or None for no end")
        self._records: Any = _Columns(source) if isinstance(source, Mapping) else source
        self.num_records = len(self._records)
        if not self.num_records:
            raise UserError("the source has no records")
        self.batch_size, self.seed, self.shuffle = batch_size, int(seed), shuffle
        self.max_epochs, self.prefetch = max_epochs, prefetch
        self._transforms: tuple[tuple[str, Callable[..., Any]], ...] = ()
        self._name = name
        self._mark: str | None = None
        self._orders: dict[int, np.ndarray] = {}
        self._spec: dict[str, tuple[tuple[int, ...], np.dtype]] | None = None

    def __repr__(self) -> str:
        return f"ArrayData({self.settings})"

    def map(self, function: Callable[[Record], Record]) -> ArrayData:
        """Put every record through a function."""
        return self._with("map", function)

    def random_map(self, function: Callable[[Record, np.random.Generator], Record]) -> ArrayData:
        """Put every record through a function of it and of random numbers, the same for equal (seed, epoch, record).

        Give transforms distinct functions: two calls with one function draw the same numbers.
        """
        return self._with("random_map", function)

    @property
    def settings(self) -> dict[str, Any]:
        """What the batches depend on, in JSON; functions by their module and name."""
        return {
            "contract": CONTRACT,
            "source": self._source(),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "max_epochs": self.max_epochs,
            "transforms": [f"{kind} {_name(function)}" for kind, function in self._transforms],
        }

    @property
    def fingerprint(self) -> str:
        """A hash of the settings."""
        return fingerprint(self.settings)

    @property
    def num_steps(self) -> int | None:
        """How many steps there are; `None` for no end."""
        return None if self.max_epochs is None else -(-self.max_epochs * self.num_records // self.batch_size)

    @property
    def steps_per_epoch(self) -> float:
        """How many steps an epoch takes; epochs need not begin with a batch."""
        return self.num_records / self.batch_size

    def batch(self, step: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """Make one step's batch, or some rows of it, reading only those.

        Args:
            step: From 0.
            rows: Which rows; all by default.

        Returns:
            Arrays of the records' values, one under another.

        Raises:
            UserError: A step that does not exist, or records that do not fit together.
        """
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            raise UserError(f"step {step}: expected 0 to {'any' if self.num_steps is None else self.num_steps - 1}")
        wanted = np.arange(self.batch_size)[rows if rows is not None else slice(None)] + step * self.batch_size
        end = None if self.max_epochs is None else self.max_epochs * self.num_records
        made = [self._record(int(number)) for number in (wanted if end is None else np.minimum(wanted, end - 1))]
        if not made:
            return {name: np.zeros((0, *shape[1:]), dtype) for name, (shape, dtype) in self.spec(step).items()}
        batch = _stack(made)
        if end is not None:
            batch[MASK] = (wanted < end).astype(np.float32)
        return batch

    def indices(self, step: int) -> list[tuple[int, int]]:
        """Say which record of the source, in which epoch, stands in each row of a step."""
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        if self.max_epochs is not None:
            numbers = [n for n in numbers if n < self.max_epochs * self.num_records]
        return [self._place(number) for number in numbers]

    def spec(self, step: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Give the shape and dtype of each array of a step's batch, which all steps share."""
        if self._spec is None:
            one = self.batch(0, slice(0, 1))
            self._spec = {name: ((self.batch_size, *a.shape[1:]), a.dtype) for name, a in one.items()}
        return self._spec

    @property
    def specs(self) -> list[dict[str, tuple[tuple[int, ...], np.dtype]]]:
        """The one spec."""
        return [self.spec(0)]

    def loader(self, *, step: int = 0, sharding: Any = None, prefetch: int | None = None) -> Loader:
        """Iterate over batches from a step on; see `LMData.loader`. A sharding names the batch axis alone."""
        from styrax.data.loader import Loader

        return Loader(self, step=step, sharding=sharding, prefetch=self.prefetch if prefetch is None else prefetch)

    def differences(self, saved: Mapping[str, Any], step: int, allow: Sequence[str] = ()) -> list[str]:
        """Say what keeps these data from going on where others with the settings `saved` stopped."""
        return changed(self.settings, saved, allow)

    def _source(self) -> str:
        if self._mark is None:
            count, records = self.num_records, self._records
            if self._name is not None:
                mark = self._name
            elif isinstance(records, _Columns):
                mark = _hash(records.arrays)
            else:
                probes = np.unique(np.linspace(0, count - 1, PROBES).astype(int)).tolist()
                mark = [_hash(records[index]) for index in probes]
            self._mark = fingerprint({"records": count, "source": mark})
        return self._mark

    def _with(self, kind: str, function: Callable[..., Any]) -> ArrayData:
        other = object.__new__(ArrayData)
        other.__dict__.update(self.__dict__, _transforms=(*self._transforms, (kind, function)), _spec=None, _orders={})
        return other

    def _place(self, number: int) -> tuple[int, int]:
        epoch, within = divmod(number, self.num_records)
        if not self.shuffle:
            return within, epoch
        order = self._orders.get(epoch)
        if order is None:
            order = permutation(self.num_records, "records", self.seed, epoch)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return int(order[within]), epoch

    def _record(self, number: int) -> Record:
        index, epoch = self._place(number)
        record = dict(self._records[index])
        for kind, function in self._transforms:
            if kind == "map":
                record = function(record)
            else:
                key = hash64("transform", f"{_name(function)} {self.seed} {epoch} {index}")
                record = function(record, np.random.Generator(np.random.Philox(key=key)))
            if not isinstance(record, Mapping):
                raise UserError(
                    f"{_name(function)} gave {type(record).__name__} for record {index}; expected a mapping from "
                    "name to array"
                )
            record = dict(record)
        if MASK in record and self.max_epochs is not None:
            raise UserError(f"a record has the name {MASK!r}, which marks padding when max_epochs is set; rename it")
        return record


class _Columns:
    """Arrays of one length, seen as records."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        lengths = {name: array.shape[0] if array.ndim else None for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise UserError(f"expected arrays with one first dimension, got {lengths or 'none'}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        assert self._length is not None
        return self._length

    def __getitem__(self, index: int) -> Record:
        return {name: array[index] for name, array in self.arrays.items()}


def _hash(values: Mapping[str, Any]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for name, value in sorted(values.items()):
        array = np.asarray(value)
        content.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        content.update(repr(value).encode() if array.dtype.hasobject else array.tobytes())
    return content.hexdigest()


def _stack(records: Sequence[Record]) -> dict[str, np.ndarray]:
    names = list(records[0])
    problems = [f"row {row} has {sorted(record)}" for row, record in enumerate(records) if set(record) != set(names)]
    if problems:
        raise UserError("\n  - ".join([f"records with other names than the first's {sorted(names)}:", *problems[:5]]))
    batch = {}
    for name in names:
        values = [np.asarray(record[name]) for record in records]
        kinds = {(value.shape, value.dtype.str) for value in values}
        if len({shape for shape, _ in kinds}) != 1:
            shapes = ", ".join(sorted({str(shape) for shape, _ in kinds}))
            raise UserError(f"{name!r} has different shapes in one batch: {shapes}; bring them to one size in map")
        batch[name] = np.stack(values)
    return batch


def _name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    kind = type(inner)
    return f"{getattr(inner, '__module__', kind.__module__)}.{getattr(inner, '__qualname__', kind.__qualname__)}"
