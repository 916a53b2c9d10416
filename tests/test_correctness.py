"""A sharded step computes what the single-device step computes: losses, per-leaf gradients and new state.

float32: ||a - b|| <= 1e-5 * max(||b||, 1e-3 * ||all gradients||) for each leaf. bf16: the error against the float32
step is at most twice the single-device bf16 step's. One device: bit-equal.
"""

import functools
from collections.abc import Collection
from typing import Literal

import jax
import numpy as np
import pytest
from flax import nnx

import alpa_lite
import gallery
from tests.comparing import called, compare, leaves, norm
from tests.marks import one_in

IN_PIPELINES = {"linen_resnet", "linen_unet", "linen_translator", "nnx_resnet"}  # run by `test_pipelines` alone
CASES = {name: case for name, case in gallery.find("zoo").items() if name not in IN_PIPELINES}
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
    "nnx_mlp", "linen_mlp_odd", "linen_gpt", "linen_convnet", "plain_custom_vjp", "plain_remat", "plain_while",
    "plain_cond", "plain_fft", "plain_sort", "plain_pick", "plain_scan", "plain_dropout_raw",
}  # fmt: skip
MODELS = [name for name in FLOAT32 if "plain" not in CASES[name].tags]


ONE_OF_EACH = [
    "nnx_mlp", "linen_gpt", "nnx_gpt_scan", "linen_convnet", "nnx_moe", "linen_gru", "nnx_gpt_tied",
    "linen_gpt_dropout", "nnx_gpt_clip",
]  # fmt: skip


def twin(name: str) -> str | None:
    """The same model in the other of linen and NNX, whose traced step differs in names and in the order of leaves."""
    library, _, model = name.partition("_")
    other = {"linen": "nnx", "nnx": "linen"}.get(library)
    return f"{other}_{model}" if f"{other}_{model}" in CASES else None


def in_turn(name: str, *, linen: bool) -> bool:
    """Whether a case runs where one of two twins is enough: a model in linen if `linen`, in NNX otherwise."""
    return twin(name) is None or name.startswith("linen") == linen


def cases(names, fast: Collection[str] = FAST, count: int = 1):
    """Those that are not fast are slow ones: one of two twins, and of these one in `count`; the others are thorough."""
    slow = [n for n in names if n not in fast]
    alone = [n for n in slow if twin(n) not in slow or in_turn(n, linen=len(n.partition("_")[2]) % 2 == 0)]
    kept = {*alone[::count]}
    marked = {n: [pytest.mark.slow if n in kept else pytest.mark.thorough, pytest.mark.optimised] for n in slow}
    return [pytest.param(n, marks=marked[n]) if n in marked else n for n in names]


def run(case, method, devices: int, *, donate: tuple[int, ...] | Literal["auto"] = "auto", donate_single=()):
    step, args = case.make()
    cluster = alpa_lite.Cluster.local(jax.devices()[:devices])
    got = called(alpa_lite.parallelize(step, method=method, cluster=cluster, donate_argnums=donate), args, case.style)
    return got, on_one_device(case, donate_single, jax.config.read("jax_disable_most_optimizations"))


@functools.cache  # most cases are run by several methods
def on_one_device(case, donate, compiled_quickly):
    """What one device computes; compilers round otherwise where they are set to compile quickly."""
    assert compiled_quickly == jax.config.read("jax_disable_most_optimizations")
    step, args = case.make()
    jit = nnx.jit if case.style == "nnx" else jax.jit
    return called(jit(step, donate_argnums=donate), args, case.style)


@pytest.mark.parametrize("name", cases(FLOAT32, count=5))
def test_auto_on_eight_devices(name):
    compare(*run(CASES[name], METHODS["auto"], 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    one_in(12, [(n, m) for n in MODELS for m in METHODS if m != "auto" and in_turn(n, linen=m in ("data", "zero3"))]),
)
def test_textbook_methods(name, method):
    """Each model by each method: of twins linen by two of the methods, and NNX by the others."""
    compare(*run(CASES[name], METHODS[method], 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "devices"),
    one_in(11, [(n, m, (2, 4)[(i + j // 2) % 2]) for i, n in enumerate(ONE_OF_EACH) for j, m in enumerate(METHODS)]),
)
def test_fewer_devices(name, method, devices):
    """Each model by each method, on two and on four devices in turn."""
    compare(*run(CASES[name], METHODS[method], devices))


@pytest.mark.optimised
@pytest.mark.parametrize(
    "name", cases([n for n in CASES if in_turn(n, linen=True)], {"linen_mlp", "plain_scan", "plain_bf16"}, 5)
)
def test_bit_equal_on_one_device(name):
    """With equal donation: that alone changes the code that LLVM makes (a fused multiply-add on JAX 0.12)."""
    bit_equal(*run(CASES[name], METHODS["auto"], 1, donate=()))


@pytest.mark.optimised
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    "name", cases([n for n in CASES if CASES[n].style == "functional" and in_turn(n, linen=False)], {"plain_vmap"}, 7)
)
def test_bit_equal_on_one_device_with_a_donated_state(name):
    bit_equal(*run(CASES[name], METHODS["auto"], 1, donate_single=0))


def bit_equal(got, want):
    for (path, a), (other, b) in zip(leaves(got).items(), leaves(want).items(), strict=True):
        assert path == other
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.parametrize("method", cases(METHODS, {"auto"}, 2))
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
