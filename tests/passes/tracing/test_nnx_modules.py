"""NNX objects are split, traced and updated in place as `nnx.jit` does, with the paths of `nnx.state`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import alpa_lite
from alpa_lite.ir.graph import check
from alpa_lite.passes.tracing import read_annotations
from alpa_lite.passes.tracing.tracing import trace
from gallery.steps import in_place
from tests.comparing import assert_close
from tests.passes.tracing.test_tracing import by_role, roles

BATCH = {"x": np.ones((8, 6), np.float32), "y": np.zeros((8, 4), np.float32)}
OPTIMIZER = optax.adam(1e-2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers: Any = nnx.List([nnx.Linear(6, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.tied = self.layers[0]
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.norm(self.layers[1](self.tied(x)))


@in_place
def nnx_step(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def test_nnx_objects_are_state_with_the_paths_of_nnx_state():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    traced = trace(nnx_step, (model, optimizer, BATCH), {})
    check(traced.graph)
    expected = [
        f"{name}{jax.tree_util.keystr(path)}"
        for name, node in (("model", model), ("optimizer", optimizer))
        for path, _ in jax.tree_util.tree_flatten_with_path(nnx.state(node))[0]
    ]
    handed = [traced.arguments[argument].path for _, argument in traced.returned_arguments]
    assert handed == ["model['layers'][1]['rngs']['key'].value"]  # read, and not updated
    expected = [path for path in expected if path not in handed]
    assert by_role(traced, "state") == expected
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    assert [o.path for o in traced.outputs] == [*expected, "result"]
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def assert_as_nnx_jit(step, make, calls=1) -> Any:
    """Calls a planned step and `nnx.jit` of it with arguments of `make()`; the planned step's own arguments."""
    (args, kwargs), (their_args, their_kwargs) = make(), make()
    planned, jitted = alpa_lite.parallelize(step, method=alpa_lite.DataParallel()), nnx.jit(step)
    for _ in range(calls):
        got, want = planned(*args, **kwargs), jitted(*their_args, **their_kwargs)
        (graph_one, state_one), (graph_two, state_two) = map(
            nnx.split, ((got, args, kwargs), (want, their_args, their_kwargs))
        )
        assert graph_one == graph_two
        assert_close(jax.tree.leaves(state_one), jax.tree.leaves(state_two))
    return args, kwargs


def test_nnx_structure_that_changes_is_written_back():
    def step(model: Any, batch):
        model.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
        model.layers[1].deterministic = True
        model.seen = nnx.Variable(batch["x"].sum())
        model(batch["x"])
        return model.tied(batch["x"]).sum()

    (model, _), _ = assert_as_nnx_jit(step, lambda: ((Net(nnx.Rngs(0)), BATCH), {}))
    assert model.layers[1].deterministic and float(model.seen[...]) == 48.0


def test_nnx_objects_inside_containers_shared_between_arguments_and_returned():
    def step(pair, batch, *, metrics, rngs):
        model, shared = pair["model"], pair["layer"]
        out = model(batch["x"]) + jax.random.normal(rngs.noise(), (8, 4))
        shared.bias[...] += out.mean(0)
        metrics.update(values=out.mean())
        return out, nnx.Linear(2, 2, rngs=nnx.Rngs(5))

    def make():
        model = Net(nnx.Rngs(0))
        pair = {"model": model, "layer": model.layers[0]}
        return (pair, BATCH), {"metrics": nnx.metrics.Average(), "rngs": nnx.Rngs(noise=3)}

    args, kwargs = assert_as_nnx_jit(step, make)
    paths = list(roles(trace(step, args, kwargs)))
    assert len(paths) == len(set(paths))
    assert "pair['layer']['bias'].value" in paths and "rngs['noise']['count'].value" in paths
    assert "pair['model']['layers'][0]['bias'].value" not in paths  # shared: named once, where it is met first


AVERAGE = jax.tree.map(jnp.array, nnx.state(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nnx.Param))


def average_step(model, average, batch):
    loss, grads = nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["y"]) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, nnx.state(model, nnx.Param)), loss


def test_a_state_is_a_value_that_comes_back_among_the_results_with_objects_or_without():
    """`nnx.split` makes a pytree; its variables are no objects that a step updates in place, as in `jax.jit`."""
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda s: ((nnx.merge(graph, s)(batch["x"]) - batch["y"]) ** 2).mean())(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    traced = trace(step, (state, BATCH), {})
    assert by_role(traced, "state") == ["state['bias'].value", "state['kernel'].value"]
    traced = trace(average_step, (model, nnx.state(model, nnx.Param), BATCH), {})
    assert len(by_role(traced, "state")) == 4
    assert {"average['bias'].value", "average['kernel'].value"} < set(by_role(traced, "state"))
    assert_as_nnx_jit(average_step, lambda: ((nnx.Linear(6, 4, rngs=nnx.Rngs(0)), AVERAGE, BATCH), {}), calls=3)


def test_annotations_behind_an_object_that_two_arguments_share():
    class Holder(nnx.Module):
        def __init__(self, net: nnx.Module) -> None:
            self.net = net
            self.scale = nnx.Param(jnp.ones(6), out_sharding=("model",), eager_sharding=False)

    def step(net, holder, batch):
        holder.scale[...] *= 0.9
        net.kernel[...] *= 0.5
        return net(batch["x"] * holder.scale[...]).sum()

    net = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    args = net, Holder(net), BATCH
    traced = trace(step, args, {})
    found = read_annotations(traced, args, {})
    assert [(traced.arguments[a.number].path, a.dims) for a in found] == [("holder['scale'].value", (("model",),))]
