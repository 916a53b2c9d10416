"""What user's callbacks raise in a pipeline, and interrupts."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.debug.callbacks import Failures
from alpa_lite.runtime.pipeline import PipelineExecutable
from gallery.steps import sgd
from tests import pipeline_driver
from tests.marks import slow

ROWS, WIDTH = 16, 8
ROOT = Path(__file__).parents[2]


def check(x):
    if np.abs(x).max() > 100:
        raise ValueError("an example is too large")
    return np.asarray(x)


def printed(x) -> None:
    check(x)


def of_example(kind: str, x: jax.Array) -> jax.Array:
    """Gives one example to a callback."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if kind == "pure":
        return jax.pure_callback(check, shape, x)
    if kind == "io":
        return io_callback(check, shape, x)
    jax.debug.callback(printed, x)
    return x


def step_of(kind: str):
    """The second of two layers gives each of its examples to a callback."""

    @jax.custom_vjp
    def checked(x):
        return jax.lax.map(lambda example: of_example(kind, example), x)

    checked.defvjp(lambda x: (checked(x), None), lambda _, g: (g,))

    return sgd(lambda params, batch: jnp.mean(checked(jnp.sin(batch["x"] @ params[0]) @ params[1]) ** 2))


def arguments():
    x = np.random.default_rng(0).uniform(1, 2, (ROWS, WIDTH)).astype(np.float32)
    return [jnp.eye(WIDTH), jnp.eye(WIDTH)], {"x": x}


@functools.cache
def executable(kind: str, devices: tuple[int, ...]) -> PipelineExecutable:
    return pipeline_driver.drive(step_of(kind), arguments(), devices=devices, microbatches=4).executable()


def failing(run: PipelineExecutable, microbatch: int) -> str:
    """The message of a step in which one example of a micro-batch is too large for the second layer."""
    state, batch = arguments()
    state[1] = state[1] * np.where(np.arange(WIDTH) == 0, 1e3, 1.0)[:, None]
    batch["x"][:, 0] = 0.0
    batch["x"][microbatch * ROWS // 4 + 1, 0] = 1.0
    with pytest.raises((ExecutionError, jax.errors.JaxRuntimeError)) as caught:
        jax.block_until_ready(run(state, batch))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("pure", (1, 1)),
        ("io", (2, 2)),
        ("debug", (2, 2)),
        slow("pure", (2, 2)),
        slow("io", (1, 1)),
        slow("debug", (1, 1)),
    ],
)
def test_a_callback_that_raises_is_located_and_the_next_step_is_right(kind, devices):
    """Also where the devices of a stage wait for each other after the callback, and only one of them has raised."""
    run = executable(kind, devices)
    want = jax.jit(step_of(kind))(*arguments())
    for microbatch in (2, 1):
        text = failing(run, microbatch)
        assert f"stage 1 forward, micro-batch {microbatch}: a callback raised ValueError" in text
        assert "an example is too large" in text
        assert "at runtime/test_pipeline_callbacks.py:" in text
        got = run(*arguments())
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


@pytest.mark.parametrize("kind", [slow("pure"), "debug"])
def test_steps_on_what_a_failed_one_left_fail_alike(kind):
    """All micro-batches fail, on devices that wait for each other before and after."""
    run = executable(kind, (2, 2))
    state, batch = arguments()
    bad = [state[0], state[1] * 1e3]
    for _ in range(3):
        with pytest.raises((ExecutionError, jax.errors.JaxRuntimeError), match="stage 1 forward, micro-batch"):
            bad, loss = run(bad, batch)
            jax.block_until_ready((bad, loss))
    jax.block_until_ready(run(state, batch))


def test_every_device_throws_the_first_note_once():
    failures = Failures()
    failures.note("forward", 3, ExecutionError("the first"))
    failures.note("forward", 3, ExecutionError("a later one"))
    assert not failures.has_error("forward", 2)
    for _ in range(3):
        assert failures.has_error("forward", 3)
        with pytest.raises(ExecutionError, match="the first"):
            failures.throw("forward", 3, 3)
    assert not failures.has_error("forward", 3)


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may have it ignored
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
from gallery.batches import f32
from tests import pipeline_driver

SLEEP = [0.0]

def sleep(x):
    time.sleep(SLEEP[0])
    return np.asarray(x)

def step(state, batch):
    def loss_fn(params):
        hidden = jnp.tanh(batch["x"] @ params[0])
        for _ in range({products}):
            hidden = hidden @ params[1]
        return jnp.mean(hidden ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(state)
    if {calls}:
        loss = jax.pure_callback(sleep, f32(), loss)
    return [w - 0.1 * g for w, g in zip(state, grads)], loss

def arguments():
    return [jnp.eye({width}), jnp.eye({width})], {{"x": np.ones(({rows}, {width}), np.float32)}}

run = pipeline_driver.drive(step, arguments(), devices=(2, 2), microbatches=4).executable()
state, batch = arguments()
state, want = jax.block_until_ready(run(state, batch))
SLEEP[0] = 0.05
print("started", flush=True)
try:
    while True:
        state, loss = run(state, batch)
except KeyboardInterrupt:
    SLEEP[0] = 0.0
    _, again = run(*arguments())
    assert float(again) == float(want)
    print("interrupted", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("calls", [True, False])
def test_an_interrupt_leaves_no_device_at_work(calls):
    """The same process runs another step, and ends by itself."""
    sizes = {"products": 1, "rows": 16, "width": 8} if calls else {"products": 10, "rows": 512, "width": 256}
    command = [sys.executable, "-c", INTERRUPTED.format(calls=calls, **sizes)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        give_up = threading.Timer(280, process.kill)
        give_up.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n", process.communicate(timeout=240)[1]
            try:
                process.wait(timeout=1)  # it is in the middle of its steps
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=240)
        finally:
            give_up.cancel()
            process.kill()
    assert (process.returncode, out) == (0, "interrupted\n"), errors
