"""Checks of a checkpointer: trees come back exactly."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from styrax.core.testing.round_trip import (
    Check,
    Factory,
    abstract,
    assert_exact,
    comes_back,
    opened,
    refuses,
    restore,
    save,
)

_DTYPES = (
    *("bool", "int4", "int8", "int32", "uint8", "uint32", "float8_e4m3fn", "float16", "bfloat16", "float32"),
    "complex64",
)
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_LONG = "a key of many letters " * 20

Pair = collections.namedtuple("Pair", "left right")


def _x(number: float = 0) -> np.ndarray:
    return np.arange(3, dtype=np.float32) + number


def _tree(make: Callable[[], Any]) -> Check:
    """Give the check that a tree comes back; it is made when the check runs, since that may start jax."""
    return lambda factory, folder: comes_back(factory, folder, make())


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    values = jnp.asarray([[0, 1, 1], [1, 0, 1]])
    return {"w": values.astype(name), "host": np.asarray(values).astype(jnp.dtype(name))}


def _wide() -> Any:
    return {
        "int64": np.array([-(2**63), 2**53 + 1]),
        "uint64": np.array([2**64 - 1], np.uint64),
        "float64": np.array([np.pi, 5e-324]),
    }


def _bits() -> Any:
    import jax.numpy as jnp

    half = np.array([0x8000, 0x0001, 0x7FA1, 0xFFC3, 0x7F80, 0x7C01], np.uint16)
    single = np.array([0x80000000, 1, 0x7FC01234, 0xFFA00001, 0x7F800000], np.uint32)
    return {"bf16": half.view(jnp.bfloat16), "f16": half.view(np.float16), "f32": single.view(np.float32)}


def _no_elements() -> Any:
    import jax.numpy as jnp

    return {"w": jnp.ones(2), "none": jnp.zeros((0, 3)), "half": jnp.zeros((2, 0), jnp.bfloat16), "np": np.empty(0)}


def _layouts() -> Any:
    return {"fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "strided": np.arange(20.0)[::-3]}


def _key(implementation: str, *shape: int) -> Any:
    import jax

    key = jax.random.key(7, impl=implementation)
    return {"key": jax.random.split(key, shape) if shape else key, "w": _x()}


def _as_saved_numpy_scalars(factory: Factory, folder: Path) -> None:
    value = {"loss": np.float32(1.5), "count": np.int64(-3), "done": np.bool_(True)}
    comes_back(factory, folder, value)
    assert_exact(restore(factory, folder, 1, {"item": None})["item"], value, "as saved (like=None)", kinds=True)


def _named_tuple(factory: Factory, folder: Path) -> None:
    value = {"pair": Pair(_x(), [_x(1)])}
    save(factory, folder, 1, {"item": value})
    assert_exact(restore(factory, folder, 1, {"item": abstract(value)})["item"], value, "as asked", kinds=True)


def _items(factory: Factory, folder: Path) -> None:
    names = ("params", "metrics", "state", "default", "pytree", "a.b-c", "0")
    items = {name: {"w": _x(number)} for number, name in enumerate(names)}
    save(factory, folder, 1, items)
    for name, value in items.items():
        assert_exact(restore(factory, folder, 1, {name: None}), {name: value}, f"item {name!r}")


def _json(factory: Factory, folder: Path) -> None:
    run = {"step": 1, "rate": 0.1, "name": "é/☃", "on": True, "off": None, "list": [1, [2, {"a": 3.5}]], "big": 2**40}
    save(factory, folder, 1, {"run": run, "params": {"w": _x()}})
    got = restore(factory, folder, 1, {"run": None})["run"]
    # Unlike `==`, text tells 1, 1.0 and True apart.
    assert json.dumps(got, sort_keys=True) == json.dumps(run, sort_keys=True), f"got {got}, expected {run}"


def _empty(factory: Factory, folder: Path) -> None:
    save(factory, folder, 1, {"params": {"w": _x()}, "empty": {}})
    for like in ({}, None):
        got = restore(factory, folder, 1, {"empty": like})["empty"]
        assert not got, f"an empty item, restored with {like}: got {got}, expected {{}}"


def _kinds(factory: Factory, folder: Path) -> None:
    import jax
    import jax.numpy as jnp

    save(factory, folder, 1, {"item": {"a": _x(), "b": jnp.asarray(_x(1))}})
    like = {"a": jax.ShapeDtypeStruct((3,), jnp.float32), "b": np.zeros(3, np.float32)}
    got = restore(factory, folder, 1, {"item": like})["item"]
    assert_exact(got, {"a": jnp.asarray(_x()), "b": _x(1)}, "kinds of arrays exchanged", kinds=True)


def _sharding(factory: Factory, folder: Path) -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    count = jax.local_device_count()
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    layouts = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x",), (None, "x"), ())]
    whole = np.arange(float(4 * count * count), dtype=np.float32).reshape(2 * count, 2 * count)
    save(factory, folder, 1, {"item": {"w": jax.device_put(whole, layouts[0])}})
    for layout in layouts:
        like = {"w": jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=layout)}
        got = restore(factory, folder, 1, {"item": like})["item"]["w"]
        assert got.sharding == layout, f"asked for the sharding {layout}, got {got.sharding}"
        assert_exact(got, jax.device_put(whole, layout), f"restored as {layout.spec}")


def _typed_as_numbers(factory: Factory, folder: Path) -> None:
    import jax

    save(factory, folder, 1, {"item": {"only_key": jax.random.key(1)}})
    like = {"only_key": jax.ShapeDtypeStruct((2,), np.uint32)}
    refuses("a typed random key, asked for as uint32,", "only_key", lambda: restore(factory, folder, 1, {"item": like}))


def _other_implementation(factory: Factory, folder: Path) -> None:
    import jax

    save(factory, folder, 1, {"item": {"only_key": jax.random.key(1, impl="rbg")}})
    like = abstract({"only_key": jax.random.key(1, impl="unsafe_rbg")})
    what = "a random key of `rbg`, asked for as `unsafe_rbg`,"
    refuses(what, "only_key", lambda: restore(factory, folder, 1, {"item": like}))


def _reused(change: Callable[[dict[str, Any]], Any]) -> Check:
    def check(factory: Factory, folder: Path) -> None:
        import jax.numpy as jnp

        values = np.arange(250_000, dtype=np.float32)
        given = {"host": values.copy(), "device": jnp.asarray(values.copy())}
        with opened(factory, folder) as checkpointer:
            checkpointer.save(3, {"params": dict(given)})
            change(given)
            given.clear()
            junk = [jnp.full(250_000, float(n)) for n in range(4)]  # likely to land in a freed buffer
            assert len(junk) == 4
            checkpointer.wait()
            got = checkpointer.restore(3, {"params": abstract({"host": values, "device": values})})["params"]
        assert_exact(got, {"host": values, "device": values}, "arrays as they were when save returned")

    return check


def _change(given: dict[str, Any]) -> None:
    given["host"][:] = -1


def _delete(given: dict[str, Any]) -> None:
    given["device"].delete()


def _donate(given: dict[str, Any]) -> None:
    import jax

    jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(given["device"]))


TREES: dict[str, Check] = {
    **{f"dtype {name}": _tree(functools.partial(_dtype, name)) for name in _DTYPES},
    "dtypes of 64 bits, as numpy arrays": _tree(_wide),
    "every bit of a float: NaNs, -0.0, subnormals": _tree(_bits),
    "an array without dimensions": _tree(lambda: {"a": np.array(7.5), "b": np.array(3, np.int8)}),
    "an array without elements": _tree(_no_elements),
    "arrays in other orders of memory": _tree(_layouts),
    "numpy scalars": _as_saved_numpy_scalars,
    "Python scalars": _tree(lambda: {"w": _x(), "a": 3, "b": 0.1, "c": True, "d": "text ☃", "e": -(2**40)}),
    "one array as an item": _tree(_x),
    "the kind of array that is asked for": _kinds,
    "the sharding that is asked for": _sharding,
    "keys with dots": _tree(lambda: {"a.b": _x(), "a.": {".b": _x(1)}}),
    "keys with slashes": _tree(lambda: {"a/b": _x(), "/": {"b/": _x(1)}}),
    "keys with spaces and line ends": _tree(lambda: {"a b": _x(), " ": {"\n": _x(1)}}),
    "keys with % and escapes": _tree(lambda: {"100%": _x(), "a%2Fb": _x(1), "%": _x(2)}),
    "keys in Unicode": _tree(lambda: {"é": _x(), "☃": {"e\u0301": _x(1)}}),
    "an empty key": _tree(lambda: {"": _x(), "a": {"": _x(1)}}),
    "a long key": _tree(lambda: {_LONG: _x(), _LONG + "?": _x(1)}),
    "keys that are numbers as text": _tree(lambda: {"0": _x(), "1": {"10": _x(1)}}),
    "integer keys": _tree(lambda: {0: _x(), 10: {2: _x(1)}, 9: _x(2)}),
    "a.b beside a: {b}": _tree(lambda: {"a": {"b": _x()}, "a.b": _x(1)}),
    "a/b beside a: {b}": _tree(lambda: {"a": {"b": _x()}, "a/b": _x(1)}),
    "a.0 beside a: [...]": _tree(lambda: {"a": [_x()], "a.0": _x(1)}),
    "lists and tuples": _tree(lambda: {"l": [_x(), [_x(1)]], "t": (_x(2), (_x(3), [_x(4)]))}),
    "the order of a long list": _tree(lambda: [_x(number) for number in range(12)]),
    "None and empty containers": _tree(lambda: {"w": _x(), "a": None, "d": {}, "l": [], "t": ((), [None])}),
    "a named tuple, asked for": _named_tuple,
    "names of items": _items,
    "plain JSON": _json,
    "an empty item": _empty,
    **{f"a random key, {name}": _tree(functools.partial(_key, name)) for name in _IMPLEMENTATIONS},
    **{f"random keys in an array, {name}": _tree(functools.partial(_key, name, 2, 3)) for name in _IMPLEMENTATIONS},
    "a random key is not given as numbers": _typed_as_numbers,
    "a random key of another implementation is refused": _other_implementation,
    "arrays changed after save": _reused(_change),
    "arrays deleted after save": _reused(_delete),
    "arrays donated after save": _reused(_donate),
}
