"""A model of the fusion of operations: the values that a compiled program writes to memory and reads from it.

Problem. Compilers put operations into kernels. Within one, values stay in registers: a chain of elementwise operations
reads its sources once and writes its end. The cost of an operation is therefore that of the values in
memory, not of all values that it touches. The rule is that of XLA's GPU passes (`priority_fusion`,
`multi_output_fusion`, `softmax_rewriter_triton` in xla/service/gpu/transforms), as seen in programs that they compile
for an H100; `benchmarks/compilers.py` compares the bytes.

Operations are of the kinds of `costs.items`.

Rule.

1. A value is *stored* if it leaves the program, if a library or control operation reads it, or if no loop makes it.
2. The result of a loop that k kernels read is stored also where that moves fewer bytes. With operands of a bytes and a
   result of v: computing it in each of the kernels reads k a, storing it moves a + k v, since one of them makes it. An
   expensive function (exp, tanh, ...) counts as four bytes an element more each time.
3. Each stored result of a loop, reduction or update has a kernel, which reads every stored value that it needs once.
4. Kernels over equally many elements, of which none needs another's results through a third, are one if they read the
   same value (siblings), or if one reads what the other writes.
5. A reduction of a short last dim whose result is repeated along that dim and meets there what was reduced is within
   one kernel with it, as both of a softmax are.
6. A product that only an addition reads is accumulated in place onto the other operand of the addition, if that is in
   memory and nothing else reads it: the GEMM with beta = 1 (`gemm_rewriter`), as in loops that accumulate gradients.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.passes.costs.items import Item, Sizes

#: The longest row that a kernel holds whole.
_ROW = 4096
#: The cost of computing an expensive function of one element once more, in bytes of memory that could be moved.
EXPENSIVE_BYTES = 4
#: A kernel has at most this many stored results: registers and parameters of a kernel are limited.
_MOST_OUTPUTS = 16
#: The kernels of one value beyond this many are not told apart, and siblings are looked for among this many neighbours.
_MANY, _NEAR = 32, 8
#: The needs of a kernel are kept of this number of kernels before it, or up to twice it, and those before are taken to
#: be needed: long programs would take bits, and time, by the square of their length.
_FAR = 4096


def traffic(
    items: Sequence[Item], nbytes: Sizes, outputs: Iterable[int]
) -> tuple[list[dict[int, float]], list[tuple[int, ...]], set[int]]:
    """Returns which values items read from memory and write to it.

    Args:
      items: in program order.
      nbytes: of each value.
      outputs: values that leave the program.

    Returns:
      For each item, operand -> how often it is read there, by all kernels together; of parts their share. For each
      item, the results that it writes. The items that start a kernel: one of each that several are merged into.
    """
    fusion = _Fusion(items, nbytes, frozenset(outputs))
    items, kernels = fusion.items, fusion.kernels()
    reads: list[dict[int, float]] = [{} for _ in items]
    starts: set[int] = set()
    for group in fusion.merge(kernels):
        roots = [kernels[k].root for k in group]
        if items[roots[0]].kind not in ("control", "accumulation"):
            starts.add(roots[0])
        own = {v for root in roots if fusion.loops[root] for v in items[root].results}
        together: dict[tuple[int, int], tuple[int, int, float]] = {}
        for k in group:
            for key, read in kernels[k].reads.items():
                together.setdefault(key, read)
        for (v, _), (item, operand, share) in together.items():
            if v not in own:
                reads[item][operand] = reads[item].get(operand, 0.0) + share
    silent = ("view", "barrier", "control", "accumulation")
    made = [() if item.kind in silent else item.results for item in items]
    return reads, [tuple([v for v in results if v in fusion.stored]) for results in made], starts


def lifetimes(items: Sequence[Item], nbytes: Sizes, outputs: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Value -> the items at which its buffer is first and last in use, for every value that items store.

    A kernel runs where its stored result is in program order, so what a chain of loops reads lives until its end. A
    kernel of loops whose results nobody here reads, such as what adds to a sum of gradients, runs as soon as it can,
    half a place before the next kernel: compilers order kernels so that buffers live shortly. The buffer of an output
    lives on, which is said as one place after the last item.
    """
    fusion = _Fusion(items, nbytes, frozenset(outputs))
    kernels = fusion.kernels()
    roots = [kernel.root for kernel in kernels]
    found: dict[int, tuple[float, float]] = {}
    for kernel in kernels:
        read = {v for v, _ in kernel.reads}.union(fusion.operands[kernel.root])
        made = [v for v in items[kernel.root].results if v in fusion.stored]
        place: float = kernel.root
        if fusion.loops[place] and not any(fusion.users.get(v) for v in made):
            ready = max((found[v][0] for v in read if v in found), default=place)
            place = min(place, roots[min(bisect.bisect_right(roots, ready), len(roots) - 1)] - 0.5)
        for v in read & found.keys():
            found[v] = found[v][0], max(place, found[v][1])
        found.update((v, (place, place)) for v in made)
    for v in outputs:
        if (v := fusion.base_of(v)) in found:
            found[v] = found[v][0], len(items)
    return found


@dataclass
class _Kernel:
    """A kernel: its root, what it reads from memory and where, and the elements that it goes through."""

    root: int
    elements: int
    # (value, the item that takes a part of it) -> the item that reads it, its operand, the share that is read
    reads: dict[tuple[int, int], tuple[int, int, float]] = field(default_factory=dict)
    producers: frozenset[int] = frozenset()  # the kernels whose results it reads
    base: int = 0  # the first kernel that `predecessors` has a bit for
    predecessors: int = 0  # the kernels that must run before, and itself, a bit for each

    def waits_for(self, kernel: int) -> bool:
        """Returns whether a kernel must run before this one; assumed for every kernel before `base`."""
        return kernel < self.base or bool(self.predecessors >> (kernel - self.base) & 1)


class _Fusion:
    """The rule of the module's docstring, applied to one straight line of items.

    Attributes:
      source: result of a view or an accumulation -> the value whose bytes it is.
      sources: for each item the values whose bytes its operands are. operands: those, each once.
      maker: value -> the item that makes it. users: value -> the items that read it.
      inner: reductions that stay within the kernel of what they reduce.
      loops: for each item whether it may be a part of any kernel.
      stored: the values that are in memory beside the inputs.
    """

    def __init__(self, items: Sequence[Item], nbytes: Sizes, outputs: frozenset[int]):
        self.items, self.nbytes = list(items), nbytes
        self.wire({})
        if products := self.accumulate(outputs):
            self.wire(products)
        self.inner = self.softmaxes()
        self.loops = [item.kind == "loop" or n in self.inner for n, item in enumerate(self.items)]
        self.stored = {self.base_of(v) for v in outputs}
        self.store()
        self.assign_kernels()

    def base_of(self, value: int) -> int:
        """Returns the value whose bytes a value is."""
        return self.source.get(value, value)

    def wire(self, products: Mapping[int, int]) -> None:
        """Records the producer and the users of each value, and the sources of each operand.

        Args:
          products: result of an accumulation -> the product that it adds.
        """
        source: dict[int, int] = {}
        users: dict[int, list[int]] = {}
        self.source, self.users = source, users
        self.sources: list[list[int]] = []
        self.operands: list[tuple[int, ...]] = []
        self.maker: dict[int, int] = {}
        for n, item in enumerate(self.items):
            own = [source.get(v, v) for v in item.operands]
            operands = tuple(own if len(own) < 2 else dict.fromkeys(own))
            self.sources.append(own)
            self.operands.append(operands)
            if item.kind in ("view", "barrier"):
                source.update(zip(item.results, own, strict=False))
                self.maker.update((v, n) for v in item.results if v not in source)
            elif item.kind == "accumulation":
                source[item.results[0]] = self.base_of(products[item.results[0]])
            else:
                self.maker.update(dict.fromkeys(item.results, n))
            if item.kind != "view":
                for v in operands:
                    users.setdefault(v, []).append(n)

    def accumulate(self, outputs: frozenset[int]) -> dict[int, int]:
        """Makes additions of products accumulations: step 6 of the rule. Returns result -> the product that it adds."""
        kept = {self.base_of(v) for v in outputs}
        products: dict[int, int] = {}
        for n, (item, operands) in enumerate(zip(tuple(self.items), self.operands, strict=True)):
            if item.linear != "addition" or len(operands) != 2:
                continue
            for v, onto in (operands, operands[::-1]):
                chain = self.product_before(v, n, kept)
                maker = self.maker.get(onto)
                in_memory = maker is None or self.items[maker].kind != "loop"
                alone = onto not in kept and self.users[onto] == [n] and self.nbytes[onto] == self.nbytes[v]
                if chain and in_memory and alone:
                    products[item.results[0]], transpositions = chain
                    self.items[n] = Item("accumulation", (onto,), item.results, item.elements)
                    for k in transpositions:
                        self.items[k] = replace(self.items[k], kind="view")
                    break
        return products

    def product_before(self, value: int, reader: int, kept: set[int]) -> tuple[int, list[int]] | None:
        """The product that a value is, and the transpositions since; None if more than a reader needs any of them."""
        transpositions: list[int] = []
        while value not in kept and self.users[value] == [reader] and value in self.maker:
            reader = self.maker[value]
            if self.items[reader].kind == "product":
                return value, transpositions
            if self.items[reader].linear != "transposition" or len(self.operands[reader]) != 1:
                break
            transpositions.append(reader)
            (value,) = self.operands[reader]
        return None

    def store(self) -> None:
        """Step 1 of the rule."""
        stored, source = self.stored, self.source
        for item, operands, loop in zip(self.items, self.operands, self.loops, strict=True):
            if loop or item.kind == "view":
                continue
            if item.kind in ("product", "accumulation", "library", "control", "barrier"):
                stored.update(operands)
            elif item.kind == "update":
                stored.update(operands[:1])
            stored.update([v for v in item.results if v not in source])

    def softmaxes(self) -> set[int]:
        """Returns reductions that stay within the kernel of their operand: step 5 of the rule."""
        found: set[int] = set()
        for n, item in enumerate(self.items):
            if item.kind == "reduce" and 0 < item.row <= _ROW and len(item.results) == 1:
                value, users = item.results[0], self.users.get(item.results[0], [])
                while len(users) == 1 and self.is_spread(users[0]):
                    (value,) = self.items[users[0]].results
                    users = self.users.get(value, [])
                if len(users) == 1 and self.items[users[0]].kind == "loop":
                    end = users[0]
                    after = self.users.get(self.items[end].results[0], [])
                    if len(self.operands[end]) == 2 and self.operands[n][0] in self.operands[end] and len(after) <= 1:
                        found.add(n)
        return found

    def is_spread(self, n: int) -> bool:
        """Returns whether an item repeats one operand, or changes it element by element."""
        item = self.items[n]
        return item.kind == "loop" and len(self.operands[n]) == len(item.results) == 1

    def assign_kernels(self) -> None:
        """Step 2 of the rule: from the end, since what reads a value is decided before it."""
        items, nbytes, users, stored = self.items, self.nbytes, self.users, self.stored
        again = self.recompute_costs()
        kernels: dict[int, frozenset[int]] = {}  # of what is not stored, those that compute it
        for n in reversed(range(len(items))):
            results = items[n].results
            if not self.loops[n] or not stored.isdisjoint(results):
                continue
            into: set[int] = set()
            for v in results:
                for user in users.get(v, ()):
                    within = kernels.get(user)
                    if within is None:
                        into.add(user)
                    else:
                        into |= within
            if len(into) > 1 and n not in self.inner:
                once, size, k = again[n], sum([nbytes[v] for v in results]), len(into)
                if k * once > once + k * size:
                    stored.update(results)
                    continue
            kernels[n] = frozenset(list(into)[:_MANY])

    def recompute_costs(self) -> dict[int, float]:
        """Loop -> the cost of computing it once more, in bytes."""
        nbytes = self.nbytes
        found: dict[int, float] = {}
        least: dict[int, float] = {}  # the bytes that a value costs where it is computed from what is in memory
        for n, (item, operands) in enumerate(zip(self.items, self.operands, strict=True)):
            if item.kind != "loop":
                continue
            if item.reads_part:
                own = nbytes[item.operands[0]] * item.read_share(nbytes)
            else:
                costs = EXPENSIVE_BYTES * item.elements if item.is_expensive else 0.0
                own = costs + sum([least.get(v, nbytes[v]) for v in operands])
            found[n] = own
            for v in item.results:
                least[v] = min(nbytes[v], own)
        return found

    def kernels(self) -> list[_Kernel]:
        """Returns every kernel before any are merged, in program order."""
        out: list[_Kernel] = []
        owner: dict[int, int] = {}
        stored, loops = self.stored, self.loops
        inside = {v: n for v, n in self.maker.items() if v not in stored}
        for n, item in enumerate(self.items):
            if item.kind in ("view", "barrier") or (loops[n] and stored.isdisjoint(item.results)):
                continue
            kernel = _Kernel(n, item.elements)
            if item.kind == "control":
                kernel.producers = frozenset([owner[v] for v in self.operands[n] if v in owner])
            else:
                self.collect(kernel, inside)
                kernel.producers = frozenset([owner[v] for v, _ in kernel.reads if v in owner])
            kernel.base = max(0, len(out) // _FAR - 1) * _FAR
            kernel.predecessors = 1 << len(out) - kernel.base
            for k in kernel.producers:
                kernel.predecessors |= out[k].predecessors >> kernel.base - out[k].base
            owner.update((self.base_of(v) if item.kind == "accumulation" else v, len(out)) for v in item.results)
            out.append(kernel)
        return out

    def collect(self, kernel: _Kernel, inside: Mapping[int, int]) -> None:
        """Records the values that a kernel reads from memory.

        Args:
          inside: value -> the item that makes it, of values that are not in memory.
        """
        items, sources, reads = self.items, self.sources, kernel.reads
        waiting, seen = [(kernel.root, 1.0, -1)], {kernel.root}
        while waiting:
            n, whole, via = waiting.pop()
            item = items[n]
            operands = zip(item.operands, sources[n], strict=True)
            if item.update[1]:
                next(operands, None)  # written in place
            partly = item.reads_part
            for operand, v in operands:
                share, part = whole, via
                if partly:  # of the first operand alone
                    share, part, partly = whole * item.read_share(self.nbytes), n, False
                maker = inside.get(v)
                if maker is None:
                    reads.setdefault((v, part), (n, operand, share))
                elif maker not in seen:
                    seen.add(maker)
                    waiting.append((maker, share, part))

    def merge(self, kernels: Sequence[_Kernel]) -> list[list[int]]:
        """Step 4 of the rule."""
        group = list(range(len(kernels)))
        members = [[k] for k in group]

        def join(a: int, b: int) -> None:
            a, b = group[a], group[b]
            if a != b and len(members[a]) + len(members[b]) <= _MOST_OUTPUTS:
                members[a] += members[b]
                for k in members[b]:
                    group[k] = a
                members[b] = []

        def are_independent(some: Iterable[int], others: Iterable[int]) -> bool:
            """Returns whether no kernel of one list needs a result of another kernel of the other list."""
            pairs = itertools.product(some, others)
            return not any(kernels[max(a, b)].waits_for(min(a, b)) for a, b in pairs if a != b)

        readers: dict[int, list[int]] = {}
        for k, kernel in enumerate(kernels):
            if self.items[kernel.root].kind in ("loop", "reduce"):
                for v, part in kernel.reads:
                    if part < 0 and self.nbytes[v] >= kernel.elements:
                        readers.setdefault(v, []).append(k)
        owner = {v: k for k, kernel in enumerate(kernels) for v in self.items[kernel.root].results}
        for v, found in readers.items():
            maker = owner.get(v)
            if maker is not None and self.loops[kernels[maker].root]:
                for k in found:
                    others = kernels[k].producers - {maker}  # none of which needs the maker, too
                    is_direct = not any(kernels[other].waits_for(maker) for other in others)
                    if is_direct and kernels[maker].elements == kernels[k].elements:
                        join(maker, k)
            for place, b in enumerate(found):
                for a in found[max(0, place - _NEAR) : place]:
                    same = kernels[a].elements == kernels[b].elements
                    if same and are_independent(members[group[a]], members[group[b]]):
                        join(a, b)
        return [m for m in members if m]
