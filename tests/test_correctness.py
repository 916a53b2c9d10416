"""A sharded step computes what the single-device step computes: losses, per-leaf gradients and new state.

float32: ||a - b|| <= 1e-5 * max(||b||, 1e-3 * ||all gradients||) for each leaf. bf16: the error against the float32
step is at most twice the single-device bf16 step's. One device: bit-equal.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import alpa_lite
from tests import zoo

IN_PIPELINES = {"linen_resnet", "linen_unet", "linen_translator", "nnx_resnet"}  # run by `test_pipelines` alone
CASES = {case.name: case for case in zoo.CASES if case.name not in IN_PIPELINES}
METHODS = {
    "auto": alpa_lite.Auto(),
    "data": alpa_lite.DataParallel(),
    "zero2": alpa_lite.Zero(stage=2),
    "zero3": alpa_lite.Zero(stage=3),
    "tensor": alpa_lite.TensorParallel(),
}
FLOAT32 = [name for name, case in CASES.items() if case.dtype == "float32"]
BF16 = [name for name, case in CASES.items() if case.dtype == "bfloat16"]
FAST = {
    "nnx_mlp", "linen_mlp_odd", "linen_gpt", "linen_convnet", "linen_moe", "linen_gru",
    "plain_custom_vjp", "plain_remat",
    "plain_while", "plain_cond", "plain_fft", "plain_sort", "plain_pick", "plain_scan", "plain_dropout_raw",
}  # fmt: skip
MODELS = [name for name in FLOAT32 if not name.startswith("plain")]


ONE_OF_EACH = [
    "nnx_mlp", "linen_gpt", "nnx_gpt_scan", "linen_convnet", "nnx_moe", "linen_gru", "nnx_gpt_tied",
    "linen_gpt_dropout", "nnx_gpt_clip",
]  # fmt: skip


def cases(names, fast: Collection[str] = FAST):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


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


def run(case, method, devices: int, *, donate: tuple[int, ...] | str = "auto", donate_single=()):
    step, args = case.make()
    cluster = alpa_lite.Cluster.local(jax.devices()[:devices])
    got = called(alpa_lite.parallelize(step, method=method, cluster=cluster, donate_argnums=donate), args, case.style)
    return got, on_one_device(case, donate_single)


@functools.cache  # most cases are run by several methods
def on_one_device(case, donate):
    step, args = case.make()
    jit = nnx.jit if case.style == "nnx" else jax.jit
    return called(jit(step, donate_argnums=donate), args, case.style)


def compare(got, want) -> None:
    """Compares leaf by leaf.

    Steps of the zoo return their gradients, and update by SGD. The user-style ones use Adam, which makes steps of equal
    length out of gradients that are rounding errors; its first moment after one step is the gradient times a constant,
    and is compared in place of what Adam makes of it.
    """
    got_leaves, want_leaves = leaves(got), leaves(want)
    assert got_leaves.keys() == want_leaves.keys()
    adam = any("mu" in name for name in want_leaves)
    if adam:
        kept = [n for n, x in want_leaves.items() if "mu" in n or x.ndim == 0 or not np.issubdtype(x.dtype, np.inexact)]
        got_leaves, want_leaves = ({n: x[n] for n in kept} for x in (got_leaves, want_leaves))
    gradients = "mu" if adam else "grads"
    total = np.sqrt(sum(norm(x) ** 2 for name, x in want_leaves.items() if gradients in name))
    wrong = []
    for name, b in want_leaves.items():
        a = got_leaves[name]
        assert a.shape == b.shape and a.dtype == b.dtype, name
        if not np.issubdtype(b.dtype, np.inexact):
            if not np.array_equal(a, b):
                wrong.append((name, a, b))
        elif norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) > 1e-5 * max(norm(b), 1e-3 * total):
            wrong.append((name, norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)), norm(b)))
    assert not wrong, wrong


@pytest.mark.parametrize("name", cases(FLOAT32))
def test_auto_on_eight_devices(name):
    compare(*run(CASES[name], METHODS["auto"], 8))


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in METHODS if m != "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_textbook_methods(name, method):
    compare(*run(CASES[name], METHODS[method], 8))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_fewer_devices(name, method, devices):
    compare(*run(CASES[name], METHODS[method], devices))


@pytest.mark.parametrize("name", cases(CASES, {"linen_mlp", "plain_scan", "linen_gpt_bf16"}))
def test_bit_equal_on_one_device(name):
    """With equal donation: that alone changes the code that LLVM makes (a fused multiply-add on JAX 0.12)."""
    bit_equal(*run(CASES[name], METHODS["auto"], 1, donate=()))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", cases([n for n in CASES if CASES[n].style == "functional"], {"plain_vmap"}))
def test_bit_equal_on_one_device_with_a_donated_state(name):
    bit_equal(*run(CASES[name], METHODS["auto"], 1, donate_single=0))


def bit_equal(got, want):
    for (path, a), (other, b) in zip(leaves(got).items(), leaves(want).items(), strict=True):
        assert path == other
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.parametrize("method", cases(METHODS, {"auto"}))
@pytest.mark.parametrize("name", cases(BF16, ()))
def test_bfloat16_error_is_at_most_twice_the_single_device_one(name, method):
    case = CASES[name]
    got, single = run(case, METHODS[method], 8)
    assert case.reference is not None
    step, args = case.reference()
    exact = leaves(jax.jit(step)(*args))
    got_leaves, single_leaves = leaves(got), leaves(single)
    total = np.sqrt(sum(norm(x) ** 2 for path, x in exact.items() if "grads" in path))
    wrong = []
    for path, b in exact.items():
        if not np.issubdtype(b.dtype, np.inexact):
            continue
        mine, theirs = (norm(np.asarray(x[path], np.float64) - b) for x in (got_leaves, single_leaves))
        if mine > 2 * theirs + 1e-5 * max(norm(b), 1e-3 * total):
            wrong.append((path, mine, theirs))
    assert not wrong, wrong
