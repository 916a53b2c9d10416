"""Golden plans: what is planned for fixed steps, clusters and methods, as a fingerprint of the whole plan.

    python -m tests.golden_plans            what differs from the stored fingerprints, and by how much
    python -m tests.golden_plans --write    plans all cases again and stores their fingerprints

A fingerprint is a digest of the plan's file, which holds no measured quantity, without the numbers of source lines, and
the figures that tell what changed. Traces differ between versions of JAX, so each supported end has a file of its own.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent / "golden"

CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "mlp a100 auto": ("linen_mlp", "a100", {}, "Auto()"),
    "mlp odd a100 auto": ("nnx_mlp_odd", "a100", {}, "Auto()"),
    "gpt a100 auto": ("linen_gpt", "a100", {}, "Auto()"),
    "gpt h100 x 2 auto": ("linen_gpt", "h100", {"nodes": 2}, "Auto()"),
    "gpt a100 zero 3": ("linen_gpt", "a100", {}, "Zero(3)"),
    "gpt a100 tensor": ("linen_gpt", "a100", {}, "TensorParallel()"),
    "gpt v100 x 2 pipeline": ("linen_gpt", "p3.16xlarge", {"nodes": 2}, "Pipeline(num_stages=2)"),
    "gpt scan v5e auto": ("nnx_gpt_scan", "v5e", {}, "Auto()"),
    "gpt scan a100 pipeline": ("linen_gpt_scan", "a100", {}, "Pipeline(num_stages=2)"),
    "gpt tied a100 pipeline": ("nnx_gpt_tied", "a100", {}, "Pipeline()"),
    "gpt bf16 h100 sharded": ("linen_gpt_bf16", "h100", {}, "Sharded((4, 2))"),
    "gpt train state a100 auto": ("linen_user_train_state", "a100", {}, "Auto()"),
    "convnet a100 auto": ("linen_convnet", "a100", {}, "Auto()"),
    "resnet v5e auto": ("nnx_resnet", "v5e", {}, "Auto()"),
    "unet a100 data parallel": ("linen_unet", "a100", {}, "DataParallel()"),
    "translator a100 auto": ("linen_translator", "a100", {}, "Auto()"),
    "moe h100 auto": ("linen_moe", "h100", {}, "Auto()"),
    "gru a100 auto": ("nnx_gru", "a100", {}, "Auto()"),
    "user optax h100 zero 2": ("linen_user_optax", "h100", {}, "Zero(2)"),
    "user convnet a100 auto": ("nnx_user_convnet", "a100", {}, "Auto()"),
    "while a100 auto": ("plain_while", "a100", {}, "Auto()"),
    "fft a100 auto": ("plain_fft", "a100", {}, "Auto()"),
    "sort v5e auto": ("plain_sort", "v5e", {}, "Auto()"),
    "solve a100 auto": ("plain_solve", "a100", {}, "Auto()"),
    "masked mean a100 pipeline": ("plain_masked_mean", "a100", {}, "Pipeline(num_stages=2)"),
    "tied a100 auto": ("plain_tied", "a100", {}, "Auto()"),
    "dropout v5e zero 3": ("plain_dropout_typed", "v5e", {}, "Zero(3)"),
    "conv 1d h100 auto": ("plain_conv_1d", "h100", {}, "Auto()"),
}
"""Name -> step of the zoo, preset of the cluster with its arguments, method."""

FILES = {"linen": "linen", "nnx": "nnx", "plain": "plain", "steps": "base", "twins": "base", "batches": "base"}
"""Modules of the gallery, by which the digests of stored plans have the parts of the zoo that they come from."""

QUICK = ("mlp a100 auto", "gpt a100 auto", "gpt scan a100 pipeline")
"""The cases that `make test` plans."""


def stored(version: str = jax.__version__) -> Path:
    """The file of a version of JAX."""
    return FOLDER / f"jax-{'.'.join(version.split('.')[:2])}.json"


def fingerprint(plan: Any) -> dict[str, Any]:
    """The digest of a plan's file, and the figures that tell what changed."""
    text = re.sub(r"\.py:\d+", ".py", json.dumps(plan.to_json(), sort_keys=True))
    for now, stored_as in FILES.items():
        text = text.replace(f"gallery/{now}.py", f"tests/zoo_{stored_as}.py")
    return {
        "digest": hashlib.blake2b(text.encode(), digest_size=12).hexdigest(),
        "step_seconds": plan.step_seconds,
        "bytes_per_device": max(stage.memory.total for stage in plan.stages),
        "meshes": [list(stage.mesh_shape) for stage in plan.stages],
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "work": plan.search.work if plan.search else 0,
    }


def plan_case(name: str) -> dict[str, Any]:
    """The fingerprint of a case, planned now."""
    import alpa_lite
    import gallery

    model, preset, arguments, method = CASES[name]
    step, args = gallery.get("zoo", model).make()
    shapes = jax.eval_shape(lambda: args)
    cluster = alpa_lite.Cluster.preset(preset, **arguments)
    chosen = eval(method, {key: getattr(alpa_lite, key) for key in dir(alpa_lite)})
    return fingerprint(alpa_lite.make_plan(step, *shapes, cluster=cluster, method=chosen, verify="off"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares, or stores, the fingerprints of this version of JAX."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    path = stored()
    before = json.loads(path.read_text()) if path.exists() else {}
    now = {name: plan_case(name) for name in CASES}
    for name, found in now.items():
        known = before.get(name)
        if known is None:
            print(f"{name}: new")
        elif known != found:
            ratio = found["step_seconds"] / known["step_seconds"]
            changed = [key for key in found if found[key] != known.get(key)]
            print(f"{name}: {ratio:.4f} of the seconds before; changed: {', '.join(changed)}")
    if given.write:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
