"""Which found collectives are which planned ones, where a compiler has changed kinds and widths: a transport problem.

Let p_i be the executions of planned collective i, f_j those of found collective j, and c_ij what a compiler would have
to do to make i into j, over the pairs that its known rewrites allow. Of the planned ones with key k it may leave out
l_k. With x_ij executions of i found as j, and y_i left out, of all

    minimise    sum c_ij x_ij + LOST sum y_i + OPEN (sum (p_i - sum_j x_ij - y_i) + sum (f_j - sum_i x_ij))
    subject to  sum_j x_ij + y_i <= p_i,   sum_i x_ij <= f_j,   sum_(i of key k) y_i <= l_k,   all >= 0

the pairs x are taken: as few as can be are left open, and of what explains as many, that with the least changes. To
pair one after the other, equal ones first, would not do: eight planned payloads of 32 bytes and four of 16, found as
eight of 32, are four that were left out and four that were sent in twice the width, if only the former may be left out.

The constraints are those of a flow, so that the vertices are integers (Schrijver, Combinatorial Optimization, 2003,
chapter 13); SciPy's HiGHS finds one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

LOST, OPEN = 1e2, 1e4
"""The cost of leaving out one execution, and that of one that nothing explains. Costs of pairs are below both."""

Planned = TypeVar("Planned", bound=Hashable)
Found = TypeVar("Found", bound=Hashable)
Group = TypeVar("Group", bound=Hashable)


def pair_executions(
    planned: Mapping[Planned, int],
    found: Mapping[Found, int],
    costs: Mapping[tuple[Planned, Found], float],
    group_of: Mapping[Planned, Group],
    lost: Mapping[Group, int],
) -> dict[tuple[Planned, Found], int]:
    """Returns how many executions of each pair are one and the same.

    Args:
      planned, found: executions.
      costs: of the pairs that are allowed.
      group_of: of planned ones; groups share what may be left out.
      lost: executions of each group that may be left out.
    """
    pairs = [pair for pair in costs if planned[pair[0]] > 0 and found[pair[1]] > 0]
    if not pairs:
        return {}
    rows = [one for one, n in planned.items() if n > 0]
    # The two limits of each variable: a pair each, then what is left out of each planned one.
    used = [limit for i, j in pairs for limit in (("planned", i), ("found", j))]
    used += [limit for i in rows for limit in (("planned", i), ("lost", group_of[i]))]
    limits = {limit: number for number, limit in enumerate(dict.fromkeys(used))}
    count = len(pairs) + len(rows)
    places = [limits[limit] for limit in used], np.repeat(np.arange(count), 2)
    amounts = {"planned": planned, "found": found, "lost": lost}
    result = linprog(
        [*(costs[pair] - 2 * OPEN for pair in pairs), *[LOST - OPEN] * len(rows)],
        A_ub=coo_array((np.ones(2 * count), places), shape=(len(limits), count)),
        b_ub=[amounts[kind].get(one, 0) for kind, one in limits],  # type: ignore[call-overload]
    )
    assert result.success, result.message  # to leave all open is feasible
    executions = np.rint(result.x[: len(pairs)]).astype(int)
    return {pair: int(n) for pair, n in zip(pairs, executions, strict=True) if n > 0}
