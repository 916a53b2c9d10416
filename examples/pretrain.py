"""Pretraining that survives: a byte-level GPT on real text, resumable, in one process or in many.

    python examples/pretrain.py --folder runs/gpt --steps 200
    alpa-lite launch -n 2 --devices-per-process 4 --platform cpu -- examples/pretrain.py --folder runs/gpt --steps 200

The same command goes on where the last run stopped: from the newest good checkpoint in `--folder`, on whatever devices
and processes there are now, under a plan that is made for them. SIGTERM, which schedulers send before they take
machines away, saves and ends with exit code 0. The text is that of the files of `--text`, or the sources of Python's
standard library; `metrics.jsonl` in the folder has a line for every step and every evaluation. Jobs for SLURM,
Kubernetes and TPU pods are in `examples/jobs`.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils

import alpa_lite
from alpa_lite.checkpoint import CheckpointManager
from alpa_lite.models import text as texts

Batch = dict[str, np.ndarray]
METHODS = {
    "auto": alpa_lite.Auto(),
    "data": alpa_lite.DataParallel(),
    "zero": alpa_lite.Zero(3),
    "tensor": alpa_lite.TensorParallel(),
    "pipeline": alpa_lite.Pipeline(),
}


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        hidden = x.shape[-1]
        return x + nn.Dense(hidden)(nn.gelu(nn.Dense(4 * hidden)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    hidden: int
    layers: int
    heads: int
    seq: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(texts.VOCAB, self.hidden)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (self.seq, self.hidden))
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return nn.Dense(texts.VOCAB)(nn.LayerNorm()(x))


def loss_fn(params: Any, apply_fn: Any, batch: Batch) -> jax.Array:
    logits = apply_fn({"params": params}, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    """One step, written for one device."""
    loss, gradients = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=gradients), loss


def eval_step(state: TrainState, batch: Batch) -> jax.Array:
    return loss_fn(state.params, state.apply_fn, batch)


def create(model: GPT, tx: optax.GradientTransformation, seed: int) -> TrainState:
    params = model.init(jax.random.key(seed), jnp.zeros((1, model.seq), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


class Text:
    """The batches of a run: which windows a step reads depends on its number alone, so that a resumed run goes on."""

    def __init__(self, files: list[pathlib.Path] | None, batch: int, seq: int, seed: int) -> None:
        self._batch, self._seq, self._seed = batch, seq, seed
        data = texts.read(files)
        if len(data) < 20 * (seq + 1):
            raise SystemExit(f"--seq {seq} needs a text of at least {20 * (seq + 1)} bytes, but it has {len(data)}")
        cut = len(data) - max(seq + 1, len(data) // 20)
        self._parts = {"train": data[:cut], "evaluation": data[cut:]}

    def batch(self, step: int, part: str = "train", rows: Any = None) -> Batch:
        """The batch of a step, or those rows of each of its arrays."""
        data = self._parts[part]
        rng = np.random.default_rng((self._seed, step, part == "train"))
        starts = rng.integers(0, len(data) - self._seq, self._batch)

        def windows(name: str, shift: int) -> np.ndarray:
            chosen = starts if rows is None else starts[rows[name]]
            return data[chosen[:, None] + shift + np.arange(self._seq)].astype(np.int32)

        return {"inputs": windows("inputs", 0), "targets": windows("targets", 1)}

    def batches(self, first: int, last: int, rows: Any) -> Iterator[Batch]:
        for step in range(first, last):
            yield self.batch(step, rows=rows)


class Preemption:
    """Whether the run is to save and end: after SIGTERM to any of its processes, at the same step in all of them."""

    def __init__(self) -> None:
        self._asked = False
        if jax.process_count() == 1:  # of several, JAX takes the signal itself, and has them agree on a step
            signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def reached(self, step: int) -> bool:
        return self._asked if jax.process_count() == 1 else multihost_utils.reached_preemption_sync_point(step)


class Metrics:
    """`metrics.jsonl`, written by the first process that has the losses.

    Losses are fetched some steps later, so that the devices are not waited for.
    """

    def __init__(self, folder: pathlib.Path, where: jax.sharding.Sharding, delay: int = 2) -> None:
        """Args:
        where: the losses lie.
        """
        writer = min(device.process_index for device in where.device_set)
        self._file = (folder / "metrics.jsonl").open("a", buffering=1) if jax.process_index() == writer else None
        self._waiting: list[tuple[int, Any, float]] = []
        self._delay = delay

    def step(self, number: int, loss: jax.Array) -> None:
        self._waiting.append((number, loss, time.time()))
        while len(self._waiting) > self._delay:
            self._write_first()

    def evaluation(self, number: int, losses: list[jax.Array]) -> None:
        if self._file is not None:
            self.event("evaluation", step=number, loss=float(np.mean([float(loss) for loss in losses])))

    def event(self, name: str, **values: Any) -> None:
        """A line after those of the steps before, also on the terminal."""
        while self._waiting:
            self._write_first()
        if self._file is not None:
            line = json.dumps({"event": name, **values})
            self._file.write(line + "\n")
            print(line, flush=True)

    def _write_first(self) -> None:
        number, loss, when = self._waiting.pop(0)
        if self._file is not None:
            self._file.write(json.dumps({"step": number, "loss": float(loss), "time": when}) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Trains; returns the step after the last."""
    options = parsed(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("alpa_lite").setLevel(logging.INFO if options.verbose else logging.WARNING)
    alpa_lite.initialize(
        timeout=options.join_timeout, heartbeat_timeout_seconds=options.heartbeat_timeout, shutdown_timeout_seconds=60
    )
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    preemption = Preemption()
    source = Text(options.text, options.batch, options.seq, options.seed)
    model = GPT(options.hidden, options.layers, options.heads, options.seq)
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, options.rate, 20, max(options.steps, 21)))
    step = alpa_lite.parallelize(train_step, method=METHODS[options.method], cache_dir=folder / "plans")
    evaluate = alpa_lite.parallelize(eval_step, state_from=step)
    make = functools.partial(create, model, tx, options.seed)

    example = source.batch(0)
    shapes = jax.eval_shape(make)
    with (
        alpa_lite.Watchdog(report_after=options.report_after, end_after=options.end_after),
        CheckpointManager(folder / "checkpoints", keep=3) as checkpoints,
    ):
        print(f"process {jax.process_index()} has joined", flush=True)
        plan = step.plan(shapes, example)
        where = step.shardings(shapes, example)
        metrics = Metrics(folder, where.results[1])
        if checkpoints.latest_step() is None:
            state, first = step.init(make, rest=(example,)), 0
        else:
            state, first, _ = checkpoints.restore(shapes, shardings=where.arguments[0])
        metrics.event("start", step=first, processes=jax.process_count(), devices=jax.device_count())
        done, saved = first, first
        for batch in step.prefetch(source.batches(first, options.steps, step.local_batch_indices())):
            state, loss = step(state, batch)
            metrics.step(done, loss)
            done += 1
            if options.evaluate_batches and (done % options.evaluate_every == 0 or done == options.steps):
                losses = [evaluate(state, source.batch(n, "evaluation")) for n in range(options.evaluate_batches)]
                metrics.evaluation(done, losses)
            ends = preemption.reached(done)
            if ends or done % options.save_every == 0 or done == options.steps:
                checkpoints.save(done, state, plan=plan)
                saved = done
            if ends:
                break
        checkpoints.wait()
        metrics.event("end", step=done, saved=saved, preempted=done < options.steps)
    return done


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of the run; all processes must see it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=pathlib.Path, nargs="+", help="files; by default Python's standard library")
    parser.add_argument("--method", choices=METHODS, default="auto")
    for name, default in (("batch", 32), ("seq", 64), ("hidden", 64), ("layers", 2), ("heads", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--evaluate-batches", type=int, default=4, help="0 evaluates never")
    parser.add_argument("--join-timeout", type=float, default=300.0, help="seconds to wait for the other processes")
    parser.add_argument("--heartbeat-timeout", type=int, default=100, help="seconds until a silent process is lost")
    parser.add_argument("--report-after", type=float, default=300.0, help="seconds without progress until a report")
    parser.add_argument("--end-after", type=float, help="seconds without progress until the process ends")
    parser.add_argument("--verbose", action="store_true", help="log what is planned and saved")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
