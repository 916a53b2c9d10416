"""Plans as the compiler would make them, written out by hand for the tests of what prints and stores plans."""

import dataclasses
import math

from jax.sharding import PartitionSpec as P

from alpa_lite.cluster import Cluster
from alpa_lite.ir import schedules
from alpa_lite.ir.timeline import Event, Timeline
from alpa_lite.plan.decisions import Alternative, Candidate, Decision, Outcome, Replicated, Solver
from alpa_lite.plan.figures import Comparison
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Collective, Division, Leaf, Memory, Stage
from tests import scheduling

WIDTH, VOCABULARY, LAYERS = 768, 50304, 12
MESH = ((4, 2), ("data", "model"))


def _params(layers: int) -> dict[str, tuple[tuple[int, ...], P]]:
    """Paths below the parameters, with shapes and shardings of the Megatron pattern."""
    out: dict[str, tuple[tuple[int, ...], P]] = {
        "['wte']['embedding']": ((VOCABULARY, WIDTH), P("model", None)),
        "['wpe']['embedding']": ((1024, WIDTH), P()),
    }
    for i in range(layers):
        layer: dict[str, tuple[tuple[int, ...], P]] = {}
        for name in ("query", "key", "value"):
            layer[f"['attn']['{name}']['kernel']"] = ((WIDTH, 12, 64), P(None, "model"))
            layer[f"['attn']['{name}']['bias']"] = ((12, 64), P("model"))
        layer |= {
            "['attn']['out']['kernel']": ((12, 64, WIDTH), P("model")),
            "['attn']['out']['bias']": ((WIDTH,), P()),
            "['mlp']['up']['kernel']": ((WIDTH, 4 * WIDTH), P(None, "model")),
            "['mlp']['up']['bias']": ((4 * WIDTH,), P("model")),
            "['mlp']['down']['kernel']": ((4 * WIDTH, WIDTH), P("model", None)),
            "['mlp']['down']['bias']": ((WIDTH,), P()),
        }
        for name in ("ln_1", "ln_2"):
            layer |= {f"['{name}']['{leaf}']": ((WIDTH,), P()) for leaf in ("scale", "bias")}
        out |= {f"['h_{i}']{path}": given for path, given in layer.items()}
    return out | {f"['ln_f']['{leaf}']": ((WIDTH,), P()) for leaf in ("scale", "bias")}


def _leaf(path: str, shape: tuple[int, ...], dtype: str, role: str, spec: P) -> Leaf:
    return Leaf(path, shape, dtype, 4 * math.prod(shape), role, spec)


def _zero_spec(shape: tuple[int, ...], spec: P) -> P:
    """`spec` with the data axis on the first free dim that divides."""
    entries = list(spec) + [None] * (len(shape) - len(spec))
    for dim, entry in enumerate(entries):
        if entry is None and shape[dim] % 4 == 0:
            entries[dim] = "data"
            break
    return P(*entries)


def gpt_leaves(layers: int = LAYERS) -> tuple[Leaf, ...]:
    """Arguments of a GPT train step: parameters, Adam's moments (sharded further), a count, and two batch arrays."""
    params = _params(layers)
    leaves = [_leaf(f"state['params']{p}", s, "float32", "state", spec) for p, (s, spec) in params.items()]
    leaves.append(_leaf("state['opt'][0].count", (), "int32", "state", P()))
    for moment in ("mu", "nu"):
        for path, (shape, spec) in params.items():
            leaves.append(_leaf(f"state['opt'][0].{moment}{path}", shape, "float32", "state", _zero_spec(shape, spec)))
    for name in ("tokens", "labels"):
        leaves.append(_leaf(f"batch['{name}']", (64, 1024), "int32", "batch", P("data")))
    return tuple(leaves)


def gpt_collectives(layers: int = LAYERS) -> tuple[tuple[Collective, ...], tuple[float, ...]]:
    """Collectives of the Megatron pattern with ZeRO-1 moments, one entry a layer as the compiler lists them."""
    entries: list[tuple[Collective, float]] = []

    def add(kind: str, axes: tuple[str, ...], size: int, seconds: float, where: str, count: int = 1) -> None:
        entries.append((Collective(kind, axes, size, count, 0, where), seconds))

    weights = 12 * WIDTH * WIDTH * 4 // 2
    for i in range(layers):
        for line, part in ((57, f"h_{i}/attn/out"), (71, f"h_{i}/mlp/down")):
            for name in (part, f"transpose({part})"):
                where = f"gpt.py:{line} {name} -> [data, None, None]"
                add("all_reduce", ("model",), 16 * 1024 * WIDTH * 2, 2.9e-4, where)
        add("reduce_scatter", ("data",), weights, 2.1e-4, f"train.py:31 gradients of h_{i}")
        add("all_gather", ("data",), weights, 2.1e-4, f"train.py:33 params of h_{i}")
    add("all_reduce", ("data", "model"), 4, 6.1e-5, "train.py:29 mean of the loss", 2)
    return tuple(c for c, _ in entries), tuple(s for _, s in entries)


def _outcome(seconds: float, communication: float, *, batch: float, size: int, changed: int = 1) -> Outcome:
    """A whole step that sends a gigabyte for every ten milliseconds of communication."""
    sent = round(communication * 1e11)
    return Outcome(seconds - communication, communication, 0.5e-3, batch, sent, size, changed)


def _alternative(strategy: tuple[tuple[str, ...], ...], layout: str, *numbers: float, step: Outcome) -> Alternative:
    """Of a whole step that fits eight gigabytes or so; its own seconds are those of moving its bytes."""
    compute, communication, transfer, size, bound = numbers
    return Alternative(
        strategy, layout, compute, communication, transfer, int(size), bound, step,
        fits=step.bytes_per_device < 10_000_000_000, bytes_seconds=compute,
    )  # fmt: skip


def gpt_decisions(layers: int = LAYERS) -> tuple[Decision, ...]:
    """Decisions for the MLP's first product and its weight, and one whose alternatives were not kept."""
    chosen = _outcome(41.3e-3, 12.1e-3, batch=38.0e-3, size=8_000_000_000, changed=0)
    product = Decision(
        key="dot_general:bsd,df->bsf:16x1024x768x3072:f32",
        name="dot_general bsd,df->bsf",
        where="gpt.py:68 h/mlp/up",
        count=layers,
        factors=(64, 1024, WIDTH, 4 * WIDTH),
        strategy=(("data",), (), (), ("model",)),
        seconds=8.3e-3,
        alternatives=(
            _alternative(
                (("data",), (), (), ("model",)), "[data, None, None] x [None, model] -> [data, None, model]",
                7.9e-3, 0.0, 4e-4, 1_207_959_552, 41.2e-3, step=chosen,
            ),
            _alternative(
                (("data", "model"), (), (), ()), "[data+model, None, None] x [None, None] -> [data+model, None, None]",
                7.9e-3, 2.3e-3, 0.0, 1_264_582_656, 41.5e-3,
                step=_outcome(43.0e-3, 13.8e-3, batch=36.0e-3, size=9_000_000_000),
            ),
            _alternative(
                (("data",), (), ("model",), ()), "[data, None, model] x [model, None] -> [data, None, None]",
                7.9e-3, 6.8e-3, 1.7e-3, 2_415_919_104, 48.9e-3,
                step=_outcome(48.9e-3, 19.7e-3, batch=45.0e-3, size=8_100_000_000),
            ),
            _alternative(
                ((), (), (), ()), "[None, None, None] x [None, None] -> [None, None, None]",
                63.2e-3, 0.0, 9.1e-3, 9_663_676_416, 96.0e-3,
                step=_outcome(105.0e-3, 20.0e-3, batch=100.0e-3, size=90_000_000_000),
            ),
        ),
    )  # fmt: skip
    weight = Decision(
        key="argument:state['params']['h_#']['mlp']['up']['kernel']:768x3072:f32",
        name="state['params']['h_{0-11}']['mlp']['up']['kernel']",
        where="argument",
        count=layers,
        factors=(WIDTH, 4 * WIDTH),
        strategy=((), ("model",)),
        seconds=2.1e-4,
        alternatives=(
            _alternative(((), ("model",)), "[None, model]", 1e-4, 0.0, 1.1e-4, 4_718_592, 41.2e-3, step=chosen),
            _alternative(
                (("data",), ("model",)), "[data, model]", 1e-4, 0.0, 3.3e-4, 1_179_648, 41.4e-3,
                step=_outcome(41.5e-3, 12.3e-3, batch=38.0e-3, size=7_900_000_000),
            ),
            _alternative(
                ((), ()), "[None, None]", 2e-4, 0.0, 0.0, 9_437_184, 41.6e-3,
                step=_outcome(41.9e-3, 11.9e-3, batch=38.0e-3, size=8_100_000_000),
            ),
        ),
        paths=tuple(f"state['params']['h_{i}']['mlp']['up']['kernel']" for i in range(layers)),
    )  # fmt: skip
    softmax = Decision(
        key="exp:16x12x1024x1024:f32",
        name="exp",
        where="gpt.py:52 h/attn/softmax",
        count=layers,
        factors=(64, 12, 1024, 1024),
        strategy=(("data",), ("model",), (), ()),
        seconds=1.1e-3,
    )
    return product, weight, softmax


def gpt_plan(layers: int = LAYERS) -> Plan:
    """A GPT of `layers` layers on eight V100s as a (4, 2) mesh."""
    leaves = gpt_leaves(layers)
    collectives, seconds = gpt_collectives(layers)
    communication = sum(seconds)
    compute = 29.2e-3
    state = tuple(leaf for leaf in leaves if leaf.role == "state")
    loss = Leaf("result[1]['loss']", (), "float32", 4, "other", P())
    memory = Memory(312_840_192, 91_226_112, 170_393_600, 2_905_604_096, 3_389_050_880)
    total = compute + communication
    solver = Solver("optimal", total, total, 0.0, 84_000_000, 12_345)
    replicated = (
        Replicated("top_k", "gpt.py:101 metrics", "no rule describes it", 412_090_368, 9.1e-4, 1),
        Replicated("sort", "gpt.py:103 metrics", "the sorted dim cannot be sharded", 262_144, 1.2e-5, 1),
    )
    stage = Stage(
        *MESH, leaves, (*state, loss), memory, total, compute, communication, solver,
        decisions=gpt_decisions(layers), replicated=replicated,
    )  # fmt: skip
    return Plan(
        method="Auto()",
        cluster=Cluster.preset("p3.16xlarge", nodes=1),
        num_devices=8,
        num_stages=1,
        num_microbatches=1,
        schedule="none",
        step_seconds=total,
        fingerprint="9f2c61d07be6a9b1d5d0c6a4f7e85b3b",
        memory_per_device=15_461_882_265,
        stages=(stage,),
        collectives=collectives,
        collective_seconds=seconds,
        solver=solver,
        division=one_stage(total, memory.total),
        rewrites=("combined", "dtype promoted: bf16 all_reduce runs as f32"),
        verification=("Shardy: the 74 planned collectives are in the lowered program, and no others",),
        candidates=(
            Candidate("Sharded", (4, 2), total, memory.total, "chosen"),
            Candidate("Sharded", (8,), 48.9e-3, 3_912_368_128, "slower"),
            Candidate("Sharded", (2, 2, 2), None, None, "cutoff"),
            Candidate("Zero(stage=1)", (8,), 49.9e-3, 4_112_368_128, "slower"),
            Candidate("DataParallel()", (8,), 51.7e-3, 5_612_368_128, "slower"),
        ),
        notes=("`batch` was taken as the batch (leading dim 64): the step neither returns nor updates it",),
        ingredients={"jax": "0.10.2", "program": "sha256:5b1c", "mesh": "(4, 2)", "arguments": "sha256:77aa"},
        planning_seconds={"tracing": 1.1, "strategies": 0.9, "sharding": 0.84, "verification": 0.2},
    )


def one_stage(seconds: float, size: int) -> Division:
    """The division of a plan on one mesh: one stage, run once."""
    timeline = Timeline((Event(0, 0.0, seconds, "step", "step", 0),), 1, "predicted")
    return Division(1, 1, 1, (0,), (0,), (0,), ("none",), (size,), (0,), timeline)


def small_plan() -> Plan:
    """Two matrices on two devices, without alternatives, remarks or collectives."""
    leaf = Leaf("params[0]", (8, 8), "float32", 256, "state", P("x"))
    solver = Solver("fixed", 1e-5, 1e-5, 0.0, 0, 0)
    stage = Stage((2,), ("x",), (leaf,), (leaf,), Memory(128, 128, 0, 64, 320), 1e-5, 1e-5, 0.0, solver)
    return dataclasses.replace(
        gpt_plan(1),
        method="DataParallel()",
        num_devices=2,
        step_seconds=1e-5,
        stages=(stage,),
        collectives=(),
        collective_seconds=(),
        solver=solver,
        division=one_stage(1e-5, 320),
        rewrites=(),
        verification=(),
        candidates=(),
        notes=(),
        planning_seconds={},
    )


def pipeline_plan(name: str = "1f1b", virtual: int = 1) -> Plan:
    """The GPT on four submeshes of two devices each, eight micro-batches; the middle stages are alike."""
    count, meshes, each = 8, 4, LAYERS // (4 * virtual)
    stages = [_stage(number, meshes * virtual, each) for number in range(meshes * virtual)]
    schedule = schedules.schedule(name, meshes, count, virtual=virtual)
    timeline = scheduling.simulate(schedule, forward=1e-3, backward=1e-3, weight=1e-3, transfer=1e-4)
    entries = [
        (Collective("all_reduce", ("data",), 12 * each * WIDTH**2 * 4, 1, s, f"train.py:31 gradients of h_{s}"), 2e-4)
        for s in range(len(stages))
    ]
    moved = 4 * 1024 * WIDTH * 2
    for a, b in [(s, s + 1) for s in range(3)] + [(s + 1, s) for s in range(3)]:
        where = f"submesh {a} to {b}, 1 buffer per micro-batch"
        entries.append((Collective("transfer", (), moved, count, a, where, (a, b)), count * 1e-4))
    plan = gpt_plan()
    return dataclasses.replace(
        plan,
        method="Pipeline()",
        num_stages=len(stages),
        num_microbatches=count,
        schedule=name,
        step_seconds=timeline.seconds,
        stages=tuple(stages),
        collectives=tuple(c for c, _ in entries),
        collective_seconds=tuple(seconds for _, seconds in entries),
        candidates=(Candidate(f"{name}, 8 micro-batches", (4,), timeline.seconds, 3_389_050_880, "chosen"),),
        division=Division(
            virtual=virtual,
            num_layers=LAYERS,
            max_layers=64,
            first_layers=tuple(each * s for s in range(len(stages))),
            submeshes=tuple(s % meshes for s in range(len(stages))),
            first_devices=(0, 2, 4, 6),
            remat=("layer",) * len(stages),
            buffer_bytes=(2_000_000_000, 1_900_000_000, 1_900_000_000, 1_800_000_000),
            temporary_bytes=(500_000_000,) * meshes,
            timeline=timeline,
        ),
    )


def _stage(number: int, of: int, layers: int) -> Stage:
    """A stage of the pipeline."""
    here = tuple(f"['h_{i}']" for i in range(number * layers, (number + 1) * layers))
    ends = {0: ("['wte']", "['wpe']", "['tokens']"), of - 1: ("['ln_f']", "['labels']")}
    names = (*here, *ends.get(number, ()))
    leaves = tuple(
        dataclasses.replace(leaf, spec=P("data") if leaf.role == "batch" else P())
        for leaf in gpt_leaves()
        if any(name in leaf.path for name in names)
    )
    memory = Memory(400_000_000, 400_000_000, 800_000_000, 900_000_000, 2_500_000_000)
    weight = dataclasses.replace(
        gpt_decisions()[1],
        name=f"state['params']['h_{{{number * layers}-{(number + 1) * layers - 1}}}']['mlp']['up']['kernel']",
        paths=tuple(f"state['params']{h}['mlp']['up']['kernel']" for h in here),
    )
    last = Replicated("top_k", "gpt.py:101 metrics", "no rule describes it", 412_090_368, 9.1e-4, 1)
    return Stage(
        (2,), ("data",), leaves, leaves, memory, 24e-3, 23.8e-3, 0.2e-3, gpt_plan().solver,
        decisions=(gpt_decisions()[0], weight),
        replicated=(last,) if number == of - 1 else (),
    )  # fmt: skip


def with_comparisons(plan: Plan) -> Plan:
    """With figures of other methods."""
    rows = (
        Comparison("data parallel", (8,), 1.25 * plan.step_seconds, plan.memory_per_device + 3 * 2**30),
        Comparison("FSDP (ZeRO-3)", (8,), 1.25 * plan.step_seconds, 2**30),
        Comparison("tensor parallel", reason="argument batch has a batch of 6, which does not divide over 8 devices"),
        Comparison("one mesh", (8,), plan.step_seconds, 2**30),
        Comparison("a faster one", (8,), 0.5 * plan.step_seconds, 2**30),
        Comparison("one device"),
    )
    return dataclasses.replace(plan, comparisons=rows)
