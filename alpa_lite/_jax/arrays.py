"""Arrays: deleted, lazy and weakly typed ones, their blocks, and random keys."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import array as _array
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.interpreters import mlir as _mlir_tables
from jax._src.interpreters import pxla as _pxla
from jax._src.random import prng as _prng
from jax.experimental.layout import Format
from jax.interpreters import mlir as _mlir

PlainArray = _array.ArrayImpl
"""The class of arrays but random keys. `isinstance(x, jax.Array)` takes microseconds, comparing classes does not."""

is_deleted: Callable[[Any], bool] = PlainArray.is_deleted
"""Of a `jax.Array`, as an unbound method: `map` with it takes a third of the time of `operator.methodcaller`."""


def accept_default_layouts(compiled: Any) -> Any:
    """Has a compiled program take arrays in the layouts that arrays of their types have by default. Returns it.

    Up to 0.10, programs compiled ahead of time compare layouts with their number of bits per item, which differs for
    types of fewer than eight, and refuse what `jax.jit` takes. The list for dispatch holds None for default layouts.
    """
    executable = compiled._executable
    executable._xla_in_layouts = executable._dispatch_in_layouts
    return compiled


class LazyArray(jax.Array):
    """A `jax.Array` that is made, once, when somebody reads it; its type and its sharding are known before.

    JAX finds what an array of a class is, and what it is on devices, in tables by class; users may give such an array
    to all that takes one. Dispatch in C++ does not know it, and asks Python.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, weak: bool, sharding: Any) -> None:
        self._known_aval = _core.ShapedArray(tuple(shape), dtype, weak_type=weak)
        self._known_sharding = sharding
        self.made: Any = None

    def make_array(self) -> Any:
        """Returns the array. Called once."""
        raise NotImplementedError

    @property
    def array(self) -> Any:
        """The array itself."""
        if self.made is None:
            self.made = array_with_weak_type(self.make_array(), self.weak_type)
        return self.made

    aval: Any = property(operator.attrgetter("_known_aval"))
    shape, dtype, ndim, size, weak_type = (
        property(operator.attrgetter(f"_known_aval.{name}")) for name in ("shape", "dtype", "ndim", "size", "weak_type")
    )
    itemsize: Any = property(lambda self: self.dtype.itemsize)
    nbytes: Any = property(lambda self: self.size * self.dtype.itemsize)
    sharding: Any = property(operator.attrgetter("_known_sharding"))
    format: Any = property(lambda self: Format(None, self._known_sharding))
    committed = _committed = property(lambda self: True)
    is_fully_addressable: Any = property(operator.attrgetter("_known_sharding.is_fully_addressable"))
    is_fully_replicated: Any = property(operator.attrgetter("_known_sharding.is_fully_replicated"))
    __array_priority__ = 100

    def __len__(self) -> int:
        return self._known_aval.shape[0]

    def devices(self) -> set[Any]:
        """As of an array."""
        return set(self._known_sharding.device_set)

    def __init_subclass__(cls) -> None:
        _core.pytype_aval_mappings[cls] = lambda lazy: lazy.aval
        _pxla.shard_arg_handlers[cls] = _shard_lazy
        _mlir.register_constant_handler(cls, _lazy_constant)  # pyright: ignore[reportArgumentType]
        if hasattr(_dtypes, "canonicalize_value_handlers"):  # up to 0.10 values are canonicalised before
            _dtypes.canonicalize_value_handlers[cls] = lambda lazy: lazy


def _shard_lazy(arrays: Sequence[Any], *where: Any) -> Any:
    return _pxla.shard_arg_handlers[PlainArray]([lazy.array for lazy in arrays], *where)


def _lazy_constant(lazy: LazyArray, _: Any) -> Any:
    return _mlir_tables.ir_constant(lazy.array)


def _forward(name: str) -> Any:
    """Returns a method or a property of arrays, of the array that a lazy one makes."""
    if not callable(getattr(PlainArray, name)):
        return property(lambda self: getattr(self.array, name))

    def method(self: LazyArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.array, name)(*args, **kwargs)

    method.__name__ = name
    return method


_OBJECTS = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__str__",
                                     "__format__", "__reduce__"}  # fmt: skip
for _name in dir(PlainArray):
    _is_own = _name in vars(LazyArray) or _name in _OBJECTS or _name in ("__del__", "__weakref__", "__numpy_dtype__")
    if not _is_own and getattr(PlainArray, _name) is not None:  # arrays have no hash
        setattr(LazyArray, _name, _forward(_name))


def blocks_of(array: Any) -> list[Any]:
    """The blocks of an array that are here, each an array on one device, in the order of the sharding's devices.

    `addressable_shards` makes an object for each block, in 10 us where it is not cached; this list is there, but for
    random keys.
    """
    return array._arrays if type(array) is PlainArray else [shard.data for shard in array.addressable_shards]


def array_of_blocks(shape: tuple[int, ...], dtype: Any, sharding: Any, blocks: Sequence[Any]) -> Any:
    """`jax.make_array_from_single_device_arrays` for blocks in the order of the sharding's devices.

    It compares them with the type and the sharding, which takes 10 us and more.
    """
    if _dtypes.issubdtype(dtype, jax.dtypes.extended):
        return jax.make_array_from_single_device_arrays(shape, sharding, list(blocks), dtype=dtype)
    aval = _aval_of(tuple(shape), dtype, sharding)
    return _array.ArrayImpl(aval, sharding, list(blocks), committed=True, _skip_checks=True)


@functools.lru_cache(maxsize=10_000)
def _aval_of(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """Returns the abstract value that JAX gives an array with a sharding."""
    return _core.update_aval_with_sharding(_core.ShapedArray(shape, dtype), sharding)


def array_with_weak_type(array: Any, weak: bool) -> Any:
    """Returns the same buffers as an array with or without a weak type. Runs no program."""
    if type(array) is not PlainArray or array.weak_type == weak:  # random keys have no weak types
        return array
    return _array.ArrayImpl(
        array.aval.update(weak_type=weak), array.sharding, array._arrays, committed=array.committed, _skip_checks=True
    )


def key_kind(dtype: Any) -> tuple[str, tuple[int, ...]]:
    """The name of the implementation of random keys of a typed dtype, and the shape of the integers behind one key."""
    return dtype._impl.name, tuple(dtype._impl.key_shape)


def data_of_keys(keys: Any) -> jax.Array:
    """Returns the integers behind typed random keys.

    `jax.random.key_data` runs a program on their devices, which a process that has none of them cannot.
    """
    return keys._base_array


def keys_of_data(data: jax.Array, dtype: Any) -> Any:
    """Returns the typed random keys that these integers are, likewise without a program."""
    return _prng.PRNGKeyArray(dtype._impl, data)
