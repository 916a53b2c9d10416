"""`jax.nn.dot_product_attention` in all its forms: one operation in the plan, and equal to one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite import Sharded
from alpa_lite.processes import effects
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import close_to_jit
from tests.helpers import local
from tests.marks import slow_but

B, T, M, D = 4, 8, 16, 4
Attend = Callable[..., Any]


def step_with(attend: Attend) -> Any:
    def loss(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, w[n]) for n in "qkv")
        return (jnp.einsum("bthd,hdm->btm", attend(q, k, v, w), w["o"]) ** 2).mean()

    return sgd(loss)


def arguments(heads: int = 4, shared: int = 4, bias: tuple[int, ...] | None = None) -> Any:
    w = {n: normal(i, M, heads if n == "q" else shared, D) / 4 for i, n in enumerate("qkv")}
    w["o"] = normal(3, heads, D, M) / 4
    if bias is not None:
        w["bias"] = normal(4, *bias)
    return w, normal(5, B, T, M)


def attend(**options: Any) -> Attend:
    def run(q: Any, k: Any, v: Any, w: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, bias=w.get("bias"), **options)

    return run


def with_residual(q: Any, k: Any, v: Any, w: Any) -> Any:
    out, lse = jax.nn.dot_product_attention(q, k, v, return_residual=True)
    return out * jnp.tanh(lse)[..., None]


LENGTHS = np.array([3, 8, 5, 8], np.int32)
MASK = np.random.default_rng(0).random((B, 1, T, T)) > 0.3
FORMS: dict[str, tuple[Attend, dict[str, Any]]] = {
    "plain": (attend(), {}),
    "causal": (attend(is_causal=True, implementation="xla"), {}),
    "mask": (attend(mask=MASK), {}),
    "mask of heads": (attend(mask=MASK.repeat(4, 1)), {}),
    "bias": (attend(), {"bias": (B, 4, T, T)}),
    "shared bias": (attend(scale=0.3), {"bias": (1, 4, T, T)}),
    "grouped queries": (attend(is_causal=True), {"shared": 2}),
    "one head of keys": (attend(), {"shared": 1}),
    "window": (attend(local_window_size=(2, 1)), {}),
    "key lengths": (attend(key_value_seq_lengths=LENGTHS), {}),
    "query lengths": (attend(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS), {}),
    "residual": (with_residual, {}),
}


def decisions(plan: alpa_lite.Plan) -> list[Any]:
    return [d for stage in plan.stages for d in stage.decisions if "dot_product_attention" in d.name]


@pytest.mark.parametrize("form", slow_but({"grouped queries"}, FORMS))
def test_every_form_is_one_operation_and_equals_one_device(form: str):
    attend, options = FORMS[form]
    w, x = arguments(**options)
    plan = close_to_jit(
        step_with(attend), w, x, rtol=2e-5, atol=2e-5, method=Sharded(mesh_shape=(2, 2)), cluster=local(4)
    ).plan(w, x)  # fmt: skip
    found = decisions(plan)
    assert [d.name.split(" [")[0] for d in found] == ["dot_product_attention", "backward of dot_product_attention"]
    assert found[0].strategy == found[1].strategy
    names = [d.name for stage in plan.stages for d in stage.decisions]
    assert not [name for name in names if name.startswith("dot_general") and f"{T},{T}]" in name]


def test_a_program_that_declines_it_has_its_products(monkeypatch: pytest.MonkeyPatch):
    """Functions of JAX are then left alone; so are they while nothing is planned."""
    monkeypatch.setenv(effects.DECLINE_VARIABLE, "jax")
    plan = alpa_lite.make_plan(step_with(attend()), *arguments(), cluster=local(4), method=alpa_lite.DataParallel())
    assert not decisions(plan)


def abstract(batch: int, length: int, width: int, heads: int, size: int, dtype: Any = jnp.float32) -> Any:
    """Shapes of weights and of a batch."""
    w = {n: jax.ShapeDtypeStruct((width, heads, size), dtype) for n in "qkv"}
    w["o"] = jax.ShapeDtypeStruct((heads, size, width), dtype)
    return w, jax.ShapeDtypeStruct((batch, length, width), dtype)


def test_it_is_sharded_over_batch_and_heads():
    """At sizes where it is worth it, and at no other dim."""
    step, args = step_with(attend(is_causal=True)), abstract(2, 1024, 1024, 16, 64)
    plan = alpa_lite.make_plan(step, *args, cluster="a100", method=Sharded(mesh_shape=(2, 4)))
    for found in decisions(plan):
        assert found.strategy[:3] == (("x",), (), ("y",)) and not any(found.strategy[3:])


@pytest.mark.parametrize("options", [{"is_causal": True}, {"key_value_seq_lengths": LENGTHS}, {"bias": (1, 8, 64, 64)}])
def test_cudnn_is_planned_for_gpus_without_one(options: dict[str, Any]):
    """Planned, checked and printed; running it needs a GPU."""
    given = {n: x for n, x in options.items() if n != "bias"}
    w, x = abstract(4, 64, 128, 8, 16, jnp.bfloat16)
    if "bias" in options:
        w["bias"] = jax.ShapeDtypeStruct(options["bias"], jnp.bfloat16)
    step = step_with(attend(implementation="cudnn", **given))
    plan = alpa_lite.make_plan(step, w, x, cluster="a100", method=Sharded(mesh_shape=(4, 2)))
    assert len(decisions(plan)) == 2 and "dot_product_attention" in str(plan.to_json())
    assert any("dot_product_attention_fwd" in line and "not checked" in line for line in plan.verification)
