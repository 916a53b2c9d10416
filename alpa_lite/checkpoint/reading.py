"""A checkpoint as a pytree of today: each leaf where the plan of today wants it, each process reading its own blocks.

What is stored is compared with what is asked for before anything is read: paths, shapes and dtypes. A number that was
saved as a Python one and is asked for as an array, or the other way round, is the same leaf: train states begin with
`step=0` and have an array of it after the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from alpa_lite import _jax
from alpa_lite.checkpoint import files, trees
from alpa_lite.checkpoint.trees import Flat
from alpa_lite.errors import CheckpointError
from alpa_lite.passes.tracing import calls
from alpa_lite.plan import Plan
from alpa_lite.runtime import global_array

MENTIONED = 12
"""The most leaves that an error names."""


class OtherModelError(CheckpointError):
    """A checkpoint holds other leaves than are asked for."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """A leaf that is asked for.

    Attributes:
      like: a leaf of the pytree that was given.
      shape, dtype: as it is stored: of random keys those of the integers behind them; None of strings.
      sharding: where it shall lie; None of what is no `jax.Array`.
    """

    like: Any
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    sharding: Sharding | None

    @property
    def is_here(self) -> bool:
        """Whether this process has some of it."""
        return self.sharding is None or global_array.is_addressable(self.sharding)


@dataclass(frozen=True)
class Empty:
    """An array without elements, which is not stored."""

    shape: tuple[int, ...]
    dtype: np.dtype


def wanted(like: Any, shardings: Any) -> tuple[Flat, list[Wanted]]:
    """The leaves that are asked for, and where.

    Args:
      like: a pytree of arrays, `jax.ShapeDtypeStruct`s, numbers and strings.
      shardings: of each leaf, as a pytree of the same structure, or as a plan; None for those that the leaves have.

    Raises:
      CheckpointError: the two pytrees have different leaves.
    """
    flat = trees.flat(like)
    if isinstance(shardings, Plan):
        shardings = shardings.shardings(like)
    given: Sequence[Any] = [None] * len(flat.leaves)
    if shardings is not None:
        own = trees.flat(shardings)
        if own.paths != flat.paths:
            odd = sorted({*own.paths} ^ {*flat.paths})
            raise CheckpointError(f"shardings= has other leaves than like=: {_listed(odd)}")
        given = own.leaves
    return flat, [_wanted(leaf, sharding) for leaf, sharding in zip(flat.leaves, given, strict=True)]


def _wanted(leaf: Any, sharding: Any) -> Wanted:
    if isinstance(leaf, str):
        return Wanted(leaf, None, None, None)
    if isinstance(leaf, trees.SCALARS):
        return Wanted(leaf, (), np.asarray(leaf).dtype, None)
    shape, dtype = tuple(leaf.shape), leaf.dtype
    if trees.is_key(leaf):
        shape, dtype = (*shape, *_jax.key_kind(dtype)[1]), np.dtype("uint32")
    if isinstance(leaf, np.ndarray | np.number | np.bool_):
        return Wanted(leaf, shape, np.dtype(dtype), None)
    found = sharding if sharding is not None else getattr(leaf, "sharding", None)
    return Wanted(leaf, shape, np.dtype(dtype), found if isinstance(found, Sharding) else _everywhere())


def _everywhere() -> Sharding:
    """Where a leaf lies that no place was given for: on the first device, or, of several processes, on all devices."""
    if jax.process_count() == 1:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(jax.sharding.Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec())


def read(folder: epath.Path, flat: Flat, leaves: Sequence[Wanted]) -> Any:
    """The pytree that is asked for.

    Raises:
      OtherModelError: the checkpoint is of another model.
      Others: it cannot be read.
    """
    state = folder / files.STATE if (folder / files.STATE).is_dir() else folder
    handler = ocp.PyTreeCheckpointHandler()
    stored = handler.metadata(state).tree
    entries, treedef = jax.tree_util.tree_flatten_with_path(stored)
    known = {trees.SEPARATOR.join(map(calls.key_text, path)): entry for path, entry in entries}
    asked = dict(zip(flat.paths, leaves, strict=True))
    metadata = files.read_metadata(folder)
    empty = {path: Empty(tuple(shape), np.dtype(dtype)) for path, (shape, dtype) in metadata.empty.items()}
    compare({**known, **empty}, asked, metadata.keys, folder)
    here = [asked[path] if asked[path].is_here else None for path in known]
    values: list[Any] = [None] * len(here)
    if any(one is not None for one in here):
        # Orbax skips placeholders.
        items = [ocp.PLACEHOLDER if one is None else 0 for one in here]
        args = [_restore_args(one, entry) for one, entry in zip(here, known.values(), strict=True)]
        found = handler.restore(
            state,
            args=ocp.args.PyTreeRestore(
                item=jax.tree_util.tree_unflatten(treedef, items),
                restore_args=jax.tree_util.tree_unflatten(treedef, args),
            ),
        )
        values = jax.tree_util.tree_leaves(found)
    by_path = dict(zip(known, values, strict=True))
    return flat.with_leaves([_as_asked(by_path.get(path), leaf) for path, leaf in asked.items()])


def _restore_args(leaf: Wanted | None, entry: Any) -> ocp.RestoreArgs:
    """How Orbax reads a leaf: numbers as Python ones, what is asked for as an array as its blocks here."""
    if leaf is None or leaf.sharding is None or not _is_array(entry):
        return ocp.RestoreArgs(restore_type=np.ndarray if _is_array(entry) else None)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
    )


def _is_array(entry: Any) -> bool:
    """Whether an array is stored, and not a number, whose metadata is a kind of an array's."""
    return not isinstance(entry, ocp.metadata.ScalarMetadata | ocp.metadata.StringMetadata)


def _as_asked(value: Any, leaf: Wanted) -> Any:
    """A leaf that was read as the one that is asked for."""
    like = leaf.like
    if leaf.sharding is None:
        if isinstance(like, str):
            return value
        return type(like)(np.asarray(value).item()) if isinstance(like, trees.SCALARS) else _host(value, like)
    shape, dtype = leaf.shape, leaf.dtype
    assert shape is not None
    if not global_array.is_addressable(leaf.sharding):
        return global_array.non_addressable(like.shape, like.dtype, leaf.sharding)
    if not isinstance(value, jax.Array):
        whole = np.zeros(shape, dtype) if value is None else np.asarray(value, dtype)
        value = jax.make_array_from_callback(shape, leaf.sharding, lambda index: whole[index])
    return _jax.keys_of_data(value, like.dtype) if trees.is_key(like) and not trees.is_key(value) else value


def _host(value: Any, like: Any) -> Any:
    found = np.zeros(like.shape, like.dtype) if value is None else np.asarray(value, like.dtype)
    return found if isinstance(like, np.ndarray) else like.dtype.type(found.item())


def compare(
    known: Mapping[str, Any], asked: Mapping[str, Wanted], kinds: Mapping[str, str], folder: epath.Path
) -> None:
    """Raises OtherModelError if what is stored is not what is asked for, and names the leaves that differ."""
    said = []
    for path, leaf in asked.items():
        if path not in known:
            said.append(f"{path} is not in it")
        elif difference := _difference(known[path], leaf, kinds.get(path)):
            said.append(f"{path} {difference}")
    said += [f"{path} is in it alone" for path in known if path not in asked]
    if said:
        raise OtherModelError(f"{folder} holds the state of another model: {_listed(said)}")


def _difference(entry: Any, leaf: Wanted, kind: str | None) -> str:
    """What is stored and what is asked for, in words, if they differ."""
    like: Any = leaf.like
    stored = None if isinstance(entry, ocp.metadata.StringMetadata) else (tuple(entry.shape), np.dtype(entry.dtype))
    if stored is None or leaf.shape is None or leaf.dtype is None:
        return "" if stored is None and leaf.shape is None else "is a string in one of the two"
    both = np.dtype(stored[1]), leaf.dtype
    python = isinstance(like, trees.SCALARS) or not _is_array(entry)
    same = both[0].kind == both[1].kind if python and stored[0] == leaf.shape == () else both[0] == both[1]
    if stored[0] != leaf.shape or not same:
        return f"is {_type(stored)} there and {_type((leaf.shape, leaf.dtype))} here"
    own = trees.kind_of_keys(like)
    if own != kind and kind is not None:
        return f"is random keys of {kind} there and {own or 'integers'} here"
    return ""


def _type(both: tuple[tuple[int, ...], np.dtype]) -> str:
    shape, dtype = both
    return f"{dtype.name}[{','.join(map(str, shape))}]"


def _listed(said: Sequence[str]) -> str:
    more = len(said) - MENTIONED
    return "; ".join(said[:MENTIONED]) + (f"; and {more} more" if more > 0 else "")
