"""Which found collectives are which planned ones, where a compiler has changed kinds and widths: a transport problem.

Let p_i be the executions of planned collective i, f_j those of found collective j, and c_ij what a compiler would have
to do to make i into j, over the pairs that its known rewrites allow. Of the planned ones with key k it may leave out
l_k. Of all

    minimise    sum c_ij x_ij + LOST sum y_i + OPEN (sum u_i + sum v_j)
    subject to  sum_j x_ij + y_i + u_i = p_i,   sum_i x_ij + v_j = f_j,   sum_(i of key k) y_i <= l_k,   all >= 0

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


def paired(
    planned: Mapping[Planned, int],
    found: Mapping[Found, int],
    costs: Mapping[tuple[Planned, Found], float],
    group_of: Mapping[Planned, Group],
    lost: Mapping[Group, int],
) -> dict[tuple[Planned, Found], int]:
    """How many executions of each pair are one and the same.

    Args:
      planned, found: executions.
      costs: of the pairs that are allowed.
      group_of: of planned ones; groups share what may be left out.
      lost: executions of each group that may be left out.
    """
    pairs = [pair for pair in costs if planned[pair[0]] > 0 and found[pair[1]] > 0]
    if not pairs:
        return {}
    rows = {one: n for n, one in enumerate(i for i, amount in planned.items() if amount > 0)}
    columns = {one: len(rows) + n for n, one in enumerate(dict.fromkeys(j for _, j in pairs))}
    groups = {one: n for n, one in enumerate(dict.fromkeys(group_of[i] for i in rows))}
    count, equations = len(pairs), len(rows) + len(columns)
    # Variables: a pair each, what is left open of each row and column, what is left out of each row.
    entries = [(rows[i], n) for n, (i, _) in enumerate(pairs)] + [(columns[j], n) for n, (_, j) in enumerate(pairs)]
    entries += [(n, count + n) for n in range(equations)]
    entries += [(n, count + equations + n) for n in range(len(rows))]
    shape = equations, count + equations + len(rows)
    cost = np.array([*(costs[pair] for pair in pairs), *[OPEN] * equations, *[LOST] * len(rows)])
    sharing = [(groups[group_of[i]], count + equations + n) for i, n in rows.items()]
    result = linprog(
        cost,
        A_eq=_ones(entries, shape),
        b_eq=[*(planned[i] for i in rows), *(found[j] for j in columns)],
        A_ub=_ones(sharing, (len(groups), shape[1])),
        b_ub=[lost.get(group, 0) for group in groups],
    )
    assert result.success, result.message  # to leave all open is feasible
    amounts = np.rint(result.x[:count]).astype(int)
    return {pair: int(n) for pair, n in zip(pairs, amounts, strict=True) if n > 0}


def _ones(entries: list[tuple[int, int]], shape: tuple[int, int]) -> coo_array:
    """A sparse matrix of ones at some places."""
    at = np.array(entries)
    return coo_array((np.ones(len(entries)), (at[:, 0], at[:, 1])), shape=shape)
