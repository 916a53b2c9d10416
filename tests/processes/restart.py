"""A job that is started again: plans, compiles and takes two steps, and writes down what it planned and compiled.

Arguments: the folder of the caches, and the cases. Prints for each case the searches for a plan, the programs that were
compiled and not found in JAX's cache, those that were found, and the losses.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import jax
import mlp
import worker

import alpa_lite
from alpa_lite import compiler

CASES: dict[str, dict[str, Any]] = {
    "one mesh": {"method": alpa_lite.Zero(stage=3)},
    "searched": {"method": alpa_lite.Sharded()},
    "pipeline": {"method": alpa_lite.Pipeline(submesh_shapes=((2,), (2,)), schedule="1f1b"), "num_microbatches": 2},
}


class Programs(logging.Handler):
    """The names of the programs that JAX looked for in its cache, by whether they were there."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.compiled: list[str] = []
        self.found: list[str] = []
        logger = logging.getLogger("jax._src.compiler")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.msg.lower()
        if "compilation cache miss" in text or "compilation cache hit" in text:
            (self.compiled if "miss" in text else self.found).append(str(record.args[0]))  # type: ignore[index]


def init(key: Any) -> Any:
    """The state."""
    return [jax.random.normal(key, (32, 32)) / 6 for key in jax.random.split(key, 4)]


def main() -> None:
    folder, *cases = worker.start()
    jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    programs, searches = Programs(), []
    search = compiler.choose_plan

    def searching(*args: Any) -> Any:
        searches.append(args)
        return search(*args)

    compiler.choose_plan = searching
    _, batch = mlp.arguments()
    out = {}
    for case in cases:
        for seen in (programs.compiled, programs.found, searches):
            seen.clear()
        train = alpa_lite.parallelize(mlp.step, cache_dir=f"{folder}/plans", **CASES[case])
        state = train.init(init, jax.random.key(0), rest=(batch,))
        losses = []
        for _ in range(2):
            state, loss = train(state, batch)
            losses.append(float(loss))
        out[case] = {
            "searches": len(searches), "compiled": [*programs.compiled], "found": [*programs.found], "losses": losses
        }  # fmt: skip
    worker.say(json.dumps(out))


if __name__ == "__main__":
    main()
