"""Random causal models in random slices of the sequence, against the whole step: wrong numbers, refusals, failures.

A seed draws the mixers of a model's layers (`token_models.py`), their norms, MLPs, residuals and recomputation, a head
that is tied or not, the form of the loss with losses of its own beside it, a number of micro-batches and the lengths of
slices. The step in slices is written by the passes and run on one device, beside the step: this is about what slices
compute, and `token_correctness.py` about pipelines that run them. Errors are in units of what is allowed, as there.

    PYTHONPATH=. python benchmarks/token_hunt.py --seed 0 --models 50 --seconds 600

prints a line for each model, adds its counts to benchmarks/results/token_hunt.json, and lists what is wrong, refused or
fails there with its seed. Every model is causal: none may be refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from alpa_lite.errors import AlpaLiteError
from alpa_lite.passes.ir.evaluation import evaluate
from benchmarks import token_models, virtual_devices
from benchmarks.token_models import TOKENS, VOCAB, Model, Weights
from tests import comparing, pipeline_driver

RESULTS = Path(__file__).parent / "results" / "token_hunt.json"
MIXERS = (
    "plain", "opaque", "grouped_rotary", "repeated_rotary", "alibi", "learned_bias", "window", "opaque_window",
    "padded", "packed", "dropped", "softcapped", "state_space", "recurrent", "linear_attention", "convolution",
    "centred", "taps",
)  # fmt: skip
LOSSES = ("shifted", "longer", "masked", "normaliser")


def main() -> None:
    """Runs seeds one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    arguments = parser.parse_args()
    virtual_devices.prepare()
    until = time.monotonic() + arguments.seconds
    for seed in range(arguments.seed, arguments.seed + arguments.models):
        if time.monotonic() > until:
            break
        row = contest(seed)
        print(seed, row, flush=True)
        keep(seed, row)
        jax.clear_caches()


def contest(seed: int) -> dict[str, Any]:
    """What a seed's model and slices came to."""
    draw = random.Random(seed)
    model, batch, words = drawn(draw)
    count = draw.randint(2, 6)
    ends = sorted(draw.sample(range(1, TOKENS), count - 1))
    lengths = tuple(b - a for a, b in itertools.pairwise([0, *ends, TOKENS]))
    said = {"model": words, "slices": list(lengths)}
    step, args = token_models.built(model, batch)
    try:
        cut = pipeline_driver.staged(step, args, 1, draw.choice((1, 2)), tokens=lengths)
    except AlpaLiteError as refusal:
        return said | {"refused": str(refusal)}
    except Exception as failure:  # whatever it is, it is a fault
        return said | {"failed": f"{type(failure).__name__}: {failure}"}
    want = jax.jit(step)(*args)
    graph = cut.traced.graph
    got = jax.tree.unflatten(
        jax.tree.structure(want), jax.jit(lambda *leaves: evaluate(graph, leaves))(*jax.tree.leaves(args))
    )
    errors = comparing.errors(got, want)
    leaf = max(errors, key=errors.__getitem__)
    return said | {"error": round(float(errors[leaf]), 4), "leaf": leaf}


def drawn(draw: random.Random) -> tuple[Model, Any, str]:
    """A model, its batch, and what they consist of in words."""
    layers = [
        {
            "mixer": draw.choice(MIXERS), "norm": draw.choice(("layer_norm", "rms_norm")),
            "mlp": draw.choice(("mlp", "gated", "none")), "residual": draw.choice(("before", "after", "beside")),
            "recompute": draw.random() < 0.25,
        }
        for _ in range(draw.randint(1, 3))
    ]  # fmt: skip
    loss, tied, places, aside = draw.choice(LOSSES), draw.random() < 0.4, draw.random() < 0.6, draw.random() < 0.3
    words = "; ".join(" ".join(str(x) for x in layer.values() if x is not False) for layer in layers)
    words += f"; loss {loss}{', tied' * tied}{', places' * places}{', aside' * aside}"

    def model(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
        tokens = batch["tokens"]
        given = tokens[:, :-1] if loss == "longer" else tokens
        x, beside = token_models.embedded(w, given, places=places), jnp.zeros(())
        for n, (layer, own) in enumerate(zip(layers, jax.random.split(key, len(layers)), strict=True)):

            def run(x: jax.Array, own: jax.Array, n: int = n, layer: Any = layer) -> jax.Array:
                return _layer(w, f"{n}", layer, x, batch, own)

            x = (jax.checkpoint(run) if layer["recompute"] else run)(x, own)
            beside += 1e-2 * (jax.nn.logsumexp(x, -1) ** 2).mean() if aside else 0
        x = token_models.layer_norm(w, "last", x)
        logits = x @ w("embed", VOCAB, x.shape[-1]).T if tied else token_models.dense(w, "head", x, VOCAB)
        return _loss(loss, logits, tokens, batch["real"]) + beside

    return model, _batch(longer=loss == "longer"), words


def _layer(w: Weights, name: str, layer: Any, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    norm, mixer = getattr(token_models, layer["norm"]), getattr(token_models, layer["mixer"])
    inner = getattr(token_models, layer["mlp"], None)
    if layer["residual"] == "beside":
        y = norm(w, f"{name}.a", x)
        return x + mixer(w, f"{name}.mix", y, batch, key) + (inner(w, f"{name}.mlp", y) if inner else 0)
    if layer["residual"] == "before":
        x = x + mixer(w, f"{name}.mix", norm(w, f"{name}.a", x), batch, key)
        return x + inner(w, f"{name}.mlp", norm(w, f"{name}.b", x)) if inner else x
    x = norm(w, f"{name}.a", x + mixer(w, f"{name}.mix", x, batch, key))
    return norm(w, f"{name}.b", x + inner(w, f"{name}.mlp", x)) if inner else x


def _loss(kind: str, logits: jax.Array, tokens: jax.Array, real: jax.Array) -> jax.Array:
    cut = logits if kind == "longer" else logits[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(cut, tokens[:, 1:])
    if kind == "masked":
        weights = real[:, 1:].astype(jnp.float32)
        return (losses * weights).sum() / weights.sum()
    return losses.mean() + (1e-3 * (jax.nn.logsumexp(logits, -1) ** 2).mean() if kind == "normaliser" else 0)


def _batch(*, longer: bool) -> dict[str, Any]:
    """Tokens with all that a mixer may ask for."""
    numbers = np.random.default_rng(1)
    starts = numbers.random((token_models.BATCH, TOKENS)) < 0.2
    first = np.maximum.accumulate(np.where(starts, np.arange(TOKENS), 0), 1)
    real = np.arange(TOKENS) < numbers.integers(4, TOKENS + 1, (token_models.BATCH, 1))
    return token_models.text(
        TOKENS + longer, real=jnp.asarray(real), part=jnp.asarray(starts.cumsum(1), jnp.int32),
        place=jnp.asarray(np.arange(TOKENS) - first, jnp.int32),
    )  # fmt: skip


def keep(seed: int, row: dict[str, Any]) -> None:
    """Adds a row to the results: all of what is a fault, the numbers of the others."""
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"errors": {}, "faults": {}}
    known["faults"].pop(str(seed), None)
    if "error" in row:
        known["errors"][str(seed)] = row["error"]
    if row.get("error", 2) > 1:
        known["faults"][str(seed)] = row
    known["jax"] = jax.__version__
    RESULTS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
