import dataclasses

from jax.sharding import PartitionSpec as P

from alpa_lite.plan.plan import Plan
from tests.plans import gpt_plan, small_plan


def _with_replicated_moments(plan: Plan) -> Plan:
    stage = plan.stages[0]
    leaves = tuple(dataclasses.replace(leaf, spec=P()) if ".mu" in leaf.path else leaf for leaf in stage.arguments)
    memory = dataclasses.replace(stage.memory, optimizer=2 * stage.memory.optimizer)
    return dataclasses.replace(plan, stages=(dataclasses.replace(stage, arguments=leaves, memory=memory),))


def test_equal_plans_do_not_differ() -> None:
    again = dataclasses.replace(gpt_plan(), planning_seconds={"tracing": 9.0})
    assert gpt_plan().diff(again) == "The plans do not differ."


def test_changed_specs_are_grouped_and_nothing_else_is_listed() -> None:
    printed = gpt_plan().diff(_with_replicated_moments(gpt_plan()))
    lines = printed.splitlines()
    (row,) = [line for line in lines if "mlp/up/kernel" in line]
    assert row.split()[1:] == ["x", "12", "P('data',", "'model')", "1.12", "MiB", "replicated", "9.00", "MiB"]
    assert "196 of the 591 arguments in both plans are sharded differently" in printed
    assert "optimizer" in printed
    assert "+100 %" in printed
    for absent in ("batch", "Settings", "Collectives", "Predicted", "Decisions", "activations"):
        assert absent not in printed


def test_every_kind_of_change_is_named() -> None:
    plan = gpt_plan()
    first, *others = plan.decisions
    stage = dataclasses.replace(
        plan.stages[0],
        decisions=(dataclasses.replace(first, strategy=((), (), (), ("data", "model"))), *others),
        replicated=plan.replicated[:1],
    )
    after = dataclasses.replace(
        plan,
        method="Zero(stage=1)",
        step_seconds=2 * plan.step_seconds,
        collectives=plan.collectives[2:],
        collective_seconds=plan.collective_seconds[2:],
        stages=(stage,),
        ingredients={**plan.ingredients, "jax": "0.12.0"},
    )
    printed = plan.diff(after)
    for wanted in (
        "method  Auto() -> Zero(stage=1)",
        "jax  0.10.2 -> 0.12.0",
        "x 48 -> x 46",
        "+100 %",
        "data - - model",
        "- - - data+model",
        "sort at gpt.py:103 metrics: the sorted dim cannot be sharded -> not listed",
    ):
        assert wanted in printed, wanted
    assert "Shardings" not in printed


def test_plans_of_different_programs() -> None:
    printed = gpt_plan().diff(small_plan())
    assert "devices  8 -> 2" in printed
    assert "mesh     data=4 model=2 -> x=2" in printed
    assert "state: 589 leaves only in the 'before' plan" in printed
    assert "params: 1 leaf only in the 'after' plan" in printed
    assert max(map(len, printed.splitlines())) <= 100
