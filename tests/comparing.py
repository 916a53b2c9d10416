"""Equality of arrays and of what steps return, random keys included.

Floats are compared leaf by leaf: ||a - b|| <= 1e-5 * max(||b||, 1e-3 * ||all gradients||).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(got, want, rtol: float = 1e-5, atol: float = 1e-6, weak_types: bool = False) -> None:
    """Raises AssertionError unless two trees have one structure, and leaves of equal types that are close.

    Leaves that are not arrays must be equal; weak types are compared on request.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        message = jax.tree_util.keystr(path)
        if not isinstance(b, jax.Array | np.ndarray | np.generic):
            assert type(a) is type(b) and a == b, message
            continue
        assert not weak_types or a.weak_type == getattr(b, "weak_type", False), message
        a, b = plain(a), plain(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), message
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=message)


def close_to_jit(fun, *args, rtol: float = 1e-5, atol: float = 1e-6, **options):
    """The planned step, after its results on these arguments were compared with those of plain `jit`."""
    from alpa_lite import parallelize  # processes import this module before they are joined

    step = parallelize(fun, **options)
    assert_close(step(*args), jax.jit(fun)(*args), rtol, atol)
    return step


def norm(x) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64).ravel()))


def is_key(x) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def plain(x) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def leaves(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): plain(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def called(step, args, style):
    """The step's results; of a step that updates modules in place, what it left in them too."""
    out = step(*args)
    return (out, [nnx.to_pure_dict(nnx.state(a)) for a in args[:2]]) if style == "nnx" else out


def errors(got, want) -> dict[str, float]:
    """For each leaf its error as a share of what is allowed; of integers, keys and the like 0 if equal, else infinity.

    Steps of the zoo return their gradients, and update by SGD. The user-style ones use Adam, which makes steps of equal
    length out of gradients that are rounding errors; its first moment after one step is the gradient times a constant,
    and is compared in place of what Adam makes of it.
    """
    got_leaves, want_leaves = leaves(got), leaves(want)
    assert got_leaves.keys() == want_leaves.keys()
    moments = [name for name in want_leaves if re.search(r"\bmu\b", name)]  # `mu`, and not the "mu" in `multi_head`
    if moments:
        kept = [
            n for n, x in want_leaves.items() if n in moments or x.ndim == 0 or not np.issubdtype(x.dtype, np.inexact)
        ]
        got_leaves, want_leaves = ({n: x[n] for n in kept} for x in (got_leaves, want_leaves))
    gradients = moments or [name for name in want_leaves if "grads" in name]
    total = np.sqrt(sum(norm(want_leaves[name]) ** 2 for name in gradients))
    return {name: error / 1e-5 for name, error in relative_errors(got_leaves, want_leaves, total).items()}


def relative_errors(got, want, total, equal_nan: bool = False) -> dict[str, float]:
    """For each leaf by path ||a - b|| / max(||b||, 1e-3 * total); of integers and the like 0 if equal, else infinity.

    Leaves that are not finite are infinitely wrong, or, with `equal_nan`, must be equal.
    """
    found = {}
    for name, b in want.items():
        a = got[name]
        assert a.shape == b.shape and a.dtype == b.dtype, name
        is_float = np.issubdtype(b.dtype, np.inexact)
        if not is_float or (equal_nan and not np.isfinite(b).all()):
            found[name] = 0.0 if np.array_equal(a, b, equal_nan=is_float) else np.inf
            continue
        error = norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        scale = max(norm(b), 1e-3 * total)
        share = error / scale if scale else 0.0 if error == 0 else np.inf
        found[name] = np.inf if np.isnan(share) else float(share)
    return found


def tree_errors(got, want) -> dict[str, float]:
    """The relative errors of the leaves of two trees; `total` is of all arrays, or of scalars if there are none."""
    a, b = leaves(got), leaves(want)
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    floats = {path for path, x in b.items() if np.issubdtype(x.dtype, np.inexact)}
    arrays = {path for path in floats if b[path].ndim} or floats
    return relative_errors(a, b, np.sqrt(sum(norm(b[path]) ** 2 for path in arrays)), equal_nan=True)


def assert_close_in_norm(got, want, tolerance: float = 1e-5) -> None:
    """Floats up to the tolerance, as a share of their own norm or of a thousandth of that of all; the rest exactly."""
    a, b = leaves(got), leaves(want)
    assert a.keys() == b.keys()
    total = np.sqrt(sum(norm(x) ** 2 for x in b.values() if np.issubdtype(x.dtype, np.inexact)))
    wrong = {path: error for path, error in relative_errors(a, b, total).items() if error > tolerance}
    assert not wrong, wrong


def compare(got, want) -> None:
    """Raises AssertionError unless all `errors` are at most 1."""
    wrong = {name: error for name, error in errors(got, want).items() if error > 1}
    assert not wrong, wrong
