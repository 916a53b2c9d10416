"""Assignment of every operation of the step to a stage, given the stages of the layers.

A forward operation runs on the stage of its layer. Its value v is *available* on A(v): the stage that makes it and
those whose forward operations read it, since it is sent there anyway. Parameters, and what is made of them, are
available where the forward pass reads them.

Backward operations are placed in three sweeps.

    down     in program order: an operation runs no higher than the cotangents that it reads; below that bound it takes
             the highest stage on which every forward value that it reads is available. A gradient product x^T dy thus
             runs where the forward product did, even if x was made on the stage before.
    sums     the additions that join contributions to one accumulator from different stages are dissolved: each stage
             accumulates what it makes.
    sink     in reverse: an operation that reads no forward value may follow its users to a lower stage if that
             sends no more bytes: operands that go there anyway are free. The bias gradient of a stage's last layer
             thus runs with the bias, and a residual stream's addition stays where both summands are.

The accumulation of a contribution runs with it. Operations after the scan follow their largest operand that has a home:
parameters are at home where the forward pass reads them, accumulators where they are filled, optimizer state where its
operations are; operations on scalars of several stages run on the lowest of them. An operation without such an operand
(a function of a step counter) follows its lowest user. Operations before the scan run where their users do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set

from scipy.cluster.hierarchy import DisjointSet

from alpa_lite.ir.graph import Atom, Op, Value
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import label_by_readers, producers, users, values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.layers.types import Assignment, Layering, Phases


def assign(layering: Layering, cuts: Sequence[int]) -> Assignment:
    """Gives every operation of the scan's body and of the top block a stage.

    Args:
      cuts: the number of the first layer of each stage after the first; rising.

    Raises:
      OptionError: `cuts` do not rise strictly within 1 .. number of layers - 1.
    """
    layering.check(cuts)
    return _Assigner(layering, cuts).assignment()


def stages(layering: Layering, cuts: Sequence[int]) -> Mapping[int, int]:
    """Returns the stage of every operation of the scan's body, as `assign` has it, for less work."""
    assigner = _Assigner(layering, cuts)
    assigner.place_body()
    return assigner.stage


class _Assigner:
    """The tables that one assignment fills."""

    def __init__(self, layering: Layering, cuts: Sequence[int]) -> None:
        self.layering, self.stages, self.free = layering, len(cuts) + 1, layering.free_ops
        self.scan, self.body, self.view = layering.scan_op, layering.body, ScanView(layering.scan_op)
        self.outputs = frozenset(values_in(self.body.outputs))
        self.values: Sequence[Value] = layering.traced.graph.values
        top = layering.traced.graph.block.ops
        at = top.index(self.scan)
        self.before, self.after = top[:at], top[at + 1 :]
        self.defined = producers((*self.body.ops, *top))
        self.users = users((*self.body.ops, *self.before, *self.after))
        self.stage = layering.stage_of(cuts)
        self.shared: set[int] = set()
        self.forward = [op for op in self.body.ops if op.index in layering.forward]
        self.backward = [op for op in self.body.ops if op.index not in layering.forward]
        self.sums = self.view.accumulators
        self.adding = {op.index: (number, value) for number, (op, value) in self.sums.items()}
        # Value -> the ops of the body that read it and are not free, directly or through free ones.
        _, self.bound = label_by_readers(
            self.body.ops, lambda op, found: found if op.index in self.free else {op.index}
        )
        self.available: dict[int, tuple[int, ...]] = {}
        self.dissolved: set[int] = set()
        self.split_sums: list[tuple[int, tuple[tuple[int, int], ...]]] = []

    def place_body(self) -> None:
        """Places the body's ops."""
        self.follow_users(self.forward, self.forward)
        self.find_available()
        self.assign_backward()
        owners = self.owners()
        self.split()
        self.sink(owners)
        self.follow_users(self.backward, self.body.ops)
        self.follow_users(self.forward, self.body.ops)

    def users_of(self, op: Op) -> list[Op]:
        """Returns the ops that read the results of an op."""
        return [user for value in op.results for user in self.users.get(value, ())]

    def stage_of_maker(self, value: int) -> int | None:
        """Returns the stage of the op that makes a value; None of inputs, and where that is not known yet."""
        return self.stage.get(self.defined[value].index) if value in self.defined else None

    def assignment(self) -> Assignment:
        """Returns everything, in the order in which it is known."""
        self.place_body()
        weight = self.weights()
        home = self.update()
        return Assignment(
            num_stages=self.stages,
            stage=dict(self.stage),
            shared_ops=frozenset(self.shared),
            home=home,
            split_sums=tuple(self.split_sums),
            dissolved_additions=frozenset(self.dissolved),
            phases=Phases({op.index: 1 + (op.index in weight) for op in self.backward}),
        )

    # -- the forward pass -----------------------------------------------------------------------------------------

    def stages_of_readers(self, values: Iterable[int], among: Container[int]) -> set[int]:
        """Returns the stages of those ops, among some, that read any of some values: see `bound`."""
        readers = {index for value in values for index in self.bound.get(value, ())}
        return {self.stage[index] for index in readers if index in among and index in self.stage}

    def follow_users(self, ops: Iterable[Op], users: Iterable[Op]) -> None:
        """Free ops run where those of `users` are that read them: shared if on several stages."""
        among = {op.index for op in users}
        for op in ops:
            if op.index in self.free:
                found = self.stages_of_readers(op.results, among)
                self.stage[op.index] = min(found, default=self.stage.get(op.index, self.stages - 1))
                if len(found) > 1:
                    self.shared.add(op.index)

    def find_available(self) -> None:
        """Computes A(v) for forward values and the body's inputs, ascending; values available nowhere are left out.

        Of the batch, masks are made wherever they are used: these users do not draw the gradient products of others.
        """
        forward = self.layering.forward
        where = {value: self.stages_of_readers([value], forward) for value in self.view.inputs.consts}
        for value in self.view.inputs.xs:
            heavy = {user.index for user in self.users.get(value, ())} & forward - self.free
            where[value] = self.stages_of_readers([value], heavy or forward)
        for op in self.forward:
            for value in op.results:
                where[value] = self.stages_of_readers([value], forward)
                if op.index not in self.free:
                    where[value].add(self.stage[op.index])
                elif not where[value]:  # only the backward pass reads what is made of these parameters
                    where[value] = set[int]().union(*(where[v] for v in op.reads if v in where))
        self.available = {value: tuple(sorted(some)) for value, some in where.items() if some}

    # -- the backward pass ----------------------------------------------------------------------------------------

    def assign_backward(self) -> None:
        """Each backward op: the highest stage, no higher than its cotangents, that has the forward values it reads."""
        for op in self.backward:
            if op.index in self.free:
                continue
            kept = [self.available[v] for v in op.reads if v in self.available]
            made = [self.stage_of_maker(v) for v in op.reads if v not in self.available]
            highest = min([self.stages - 1, *(stage for stage in made if stage is not None)])
            self.stage[op.index] = _meet(kept, highest)

    def owners(self) -> dict[int, int]:
        """Accumulator -> the stage that it should be on: its parameter's, where that is known."""
        groups = _same_shape_groups(self.after, self.values)
        by_group: dict[int, int] = {}
        for value, stage in self.parameter_homes().items():
            group = groups.get(value)
            if group is not None:
                by_group[group] = min(stage, by_group.get(group, stage))
        times = Counter(value for op in self.after for value in op.reads)
        for op in reversed(self.after):  # through what is not elementwise, such as the transpose of a lookup
            found = [by_group[groups[v]] for v in op.results if groups.get(v) in by_group]
            for value in op.reads if found else ():
                if self.values[value].shape and times[value] == 1:
                    by_group.setdefault(groups.setdefault(value, value), min(found))
        group_of = {number: groups.get(self.scan.results[number]) for number in self.sums}
        return {number: by_group[group] for number, group in group_of.items() if group in by_group}

    def parameter_homes(self) -> dict[int, int]:
        """Input of the top block -> the lowest stage whose forward pass reads it, directly or through free ops."""
        homes: dict[int, int] = {}
        inner = dict(zip(self.body.inputs, self.scan.operands, strict=True))
        for value, where in self.available.items():
            source = inner.get(value)
            if isinstance(source, int):
                homes[source] = min(where[0], homes.get(source, where[0]))
        for op in reversed(self.before):
            found = [homes[v] for v in op.results if v in homes]
            for value in op.reads if found else ():
                homes[value] = min(*found, homes.get(value, self.stages))
        return homes

    def split(self) -> None:
        """Finds accumulators with contributions from several stages, and dissolves the additions that join them."""
        for number, (adding, contribution) in sorted(self.sums.items()):
            if adding.index in self.layering.forward:
                continue
            joins: list[Op] = []
            summands = self.summands(contribution, joins)
            if len({stage for _, stage in summands}) > 1:
                self.split_sums.append((number, tuple(summands)))
                self.dissolved.update(op.index for op in (*joins, adding))

    def summands(self, value: int, joins: list[Op]) -> list[tuple[int, int]]:
        """(value, stage) of each summand, looking through additions over several stages with no other reader."""
        op, stage = self.defined.get(value), self.stage_of_maker(value)
        if op is None or stage is None or op.index in self.layering.forward:
            return [(value, stage or 0)]
        if op.name in primitives.ADDS and len(self.users.get(value, ())) == 1 and len(op.reads) == 2:
            inner: list[Op] = []
            parts = [part for operand in op.reads for part in self.summands(operand, inner)]
            if len({stage for _, stage in parts}) > 1:
                joins += [op, *inner]
                return parts
        return [(value, stage)]

    def sink(self, owners: Mapping[int, int]) -> None:
        """Moves ops that read no forward value to their users' lower stage where that sends no more bytes."""
        before = dict(self.stage)
        for index, (number, _) in self.adding.items():
            if index in self.stage and index not in self.layering.forward and number in owners:
                self.stage[index] = min(self.stage[index], owners[number])
        for op in reversed(self.backward):
            if op.index in self.free or op.index in self.adding or op.index in self.dissolved:
                continue
            users = [u.index for u in self.users_of(op) if u.index in self.stage and u.index not in self.dissolved]
            if not users or not self.outputs.isdisjoint(op.results):
                continue
            goal = max(self.stage[u] for u in users)
            can_sink = all(goal in self.available[v] for v in op.reads if v in self.available)
            saved = sum(self.values[v].nbytes for v in op.results)
            if goal < self.stage[op.index] and can_sink and self.sent_bytes(op, goal) <= saved:
                self.stage[op.index] = goal
        self.rise(before)
        for index, (_, value) in self.adding.items():
            made = self.stage_of_maker(value)
            if index not in self.dissolved and made is not None:
                self.stage[index] = made
        for number, (carry, parts) in enumerate(self.split_sums):
            stages = [self.stage_of_maker(v) for v, _ in parts]
            moved = [(v, s if made is None else made) for (v, s), made in zip(parts, stages, strict=True)]
            self.split_sums[number] = carry, tuple(moved)
        for op in self.backward:
            if op.index in self.dissolved:
                self.stage[op.index] = min(s for v in op.reads if (s := self.stage_of_maker(v)) is not None)

    def rise(self, before: Mapping[int, int]) -> None:
        """Takes back moves that would send the gradient of one parameter at every micro-batch: it is added up here."""

        def choose(op: Op, sums: Set[int]) -> Set[int]:
            """The sums that the results of an op reach; of several no more than that they are."""
            return {self.adding[op.index][0]} if op.index in self.adding else sums if len(sums) < 2 else {-1, -2}

        found, _ = label_by_readers(self.backward, choose)
        alone = {op.index for op, sums in zip(self.backward, found, strict=True) if len(sums) == 1}
        for op in self.backward:
            if self.stage.get(op.index) == before.get(op.index):
                continue
            made = [self.defined[v].index for v in op.reads if v in self.defined]
            stages = [self.stage[i] for i in made if i in alone and i in self.stage]
            if any(s > self.stage[op.index] for s in stages):
                self.stage[op.index] = min(stages)

    def sent_bytes(self, op: Op, stage: int) -> int:
        """Returns bytes that go to a stage only for this op."""
        total = 0
        for value in dict.fromkeys(op.reads):
            made = self.defined.get(value)
            if value in self.available or made is None or made.index in self.free:
                continue
            others = (u for u in self.users[value] if u is not op and u.index in self.stage)
            if self.stage[made.index] != stage and all(self.stage[u.index] != stage for u in others):
                total += self.values[value].nbytes
        return total

    def weights(self) -> frozenset[int]:
        """The backward ops that feed accumulators alone, by a way that neither leaves the stage nor enters a layer.

        An op whose results reach a lower layer is part of the way of the cotangents. Where a layer's backward pass
        begins is found by placing every layer on a stage of its own.
        """
        layers = len(self.layering.layers)
        layer = self.stage if layers == self.stages else stages(self.layering, range(1, layers))

        def choose(op: Op, readers: Set[tuple[bool, int, int]]) -> Set[tuple[bool, int, int]]:
            """Whether an op is one of them, its stage and its layer; none of additions that are dissolved."""
            here = self.stage[op.index], layer[op.index]
            stays = readers <= {(True, *here)} and self.outputs.isdisjoint(op.results)
            return set() if op.index in self.dissolved else {(stays or op.index in self.adding, *here)}

        found, _ = label_by_readers(self.backward, choose)
        return frozenset(op.index for op, some in zip(self.backward, found, strict=True) if any(w for w, *_ in some))

    # -- the update ---------------------------------------------------------------------------------------------

    def update(self) -> dict[int, int]:
        """Places the ops of the top block, and finds the home of each of its inputs."""
        home = self.parameter_homes()
        split = {number: [stage for _, stage in parts] for number, parts in self.split_sums}
        for number, (value, out) in enumerate(zip(self.scan.results, self.body.outputs, strict=True)):
            made = [self.stage_of_maker(v) for v in values_in([out])]
            if found := split.get(number) or [stage for stage in made if stage is not None]:
                home[value] = min(found)
        for op in self.after:  # what has a home draws its operations: the largest, of equal ones the lowest
            if found := [(-self.values[v].nbytes, home[v]) for v in op.reads if v in home]:
                self.place(op, min(found)[1], home)
        for op in reversed(self.after):  # what has none follows its users
            if op.index not in self.stage:
                self.place(op, min(self.stages_of_users(op), default=0), home)
            for value in op.reads:
                if value not in home and value not in self.defined:
                    home[value] = self.stage[op.index]
        inner: dict[Atom, list[int]] = {}  # operand of the scan -> inputs of its body
        for outer, value in zip(self.scan.operands, self.body.inputs, strict=True):
            inner.setdefault(outer, []).append(value)
        runs: dict[int, set[int]] = {}
        for op in reversed(self.before):
            found = self.stages_of_users(op).union(*(runs.get(user.index, ()) for user in self.users_of(op)))
            for user in (u for v in op.results for i in inner.get(v, ()) for u in self.users.get(i, ())):
                found |= self.stages_of_readers(user.results, self.stage) if user.index in self.shared else set()
                found.add(self.stage[user.index])
            self.place(op, min(found, default=0), home)
            runs[op.index] = found if op.index in self.free else {self.stage[op.index]}
            if len(runs[op.index]) > 1:
                self.shared.add(op.index)
            for value in op.reads:
                if value not in self.defined:
                    home[value] = min(home.get(value, self.stages), self.stage[op.index])
        for value in (inputs := self.layering.traced.graph.block.inputs):
            if value not in home:
                readers = [u.index for i in inner.get(value, ()) for u in self.users.get(i, ())]
                home[value] = min((self.stage[i] for i in readers if i in self.stage), default=0)
        return {value: home[value] for value in inputs}

    def place(self, op: Op, stage: int, home: dict[int, int]) -> None:
        self.stage[op.index] = stage
        home.update((value, stage) for value in op.results)

    def stages_of_users(self, op: Op) -> set[int]:
        return {self.stage[u.index] for u in self.users_of(op) if u.index in self.stage}


def _meet(kept: Sequence[tuple[int, ...]], highest: int) -> int:
    """The highest stage up to `highest` in all sets; if there is none, the lowest of the highest stages of each set."""
    common = set(range(highest + 1)).intersection(*kept) if kept else {highest}
    if common:
        return max(common)
    below = [max(s for s in where if s <= highest) for where in kept if where[0] <= highest]
    return min(below, default=highest)


def _same_shape_groups(ops: Iterable[Op], values: Sequence[Value]) -> dict[int, int]:
    """Value -> group: values of more than one element that elementwise operations combine."""
    groups = DisjointSet()
    for op in ops:
        if len(op.results) != 1 or not values[op.results[0]].shape:
            continue
        shape = values[op.results[0]].shape
        for value in op.reads:
            if values[value].shape == shape:
                groups.add(value)
                groups.add(op.results[0])
                groups.merge(value, op.results[0])
    return {value: groups[value] for value in groups}
