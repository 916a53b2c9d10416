"""Configurations of one mesh: which only add to which, and the micro-batches that may fit."""

from __future__ import annotations

import itertools

import pytest

from alpa_lite.passes.layers.rematerialisation import Remat
from alpa_lite.passes.search.configs import ExecutionConfig, next_feasible_microbatches

NONE, SELECTIVE, LAYER, FIRST = Remat(), Remat("selective"), Remat("layer"), Remat("layer", (1, 4))


def test_more_micro_batches_and_more_recomputation_only_add() -> None:
    configs = [ExecutionConfig(count, remat) for count in (1, 2) for remat in (NONE, SELECTIVE, LAYER, FIRST)]
    adds = {(str(a), str(b)) for a, b in itertools.product(configs, configs) if a.only_adds_to(b)}
    assert all((str(config), str(config)) in adds for config in configs)
    assert (str(configs[6]), str(configs[1])) in adds  # two micro-batches and layers, to one and selective
    assert (str(configs[1]), str(configs[4])) not in adds
    assert (str(configs[3]), str(configs[1])) not in adds  # some layers save less of these than selective everywhere
    assert {a for a, b in adds if b == str(configs[0])} == {str(config) for config in configs}


@pytest.mark.parametrize(("floor", "state", "activations"), [(0.0, 0.0, 8.0), (1.0, 2.0, 30.0), (3.0, 3.5, 100.0)])
def test_no_number_of_micro_batches_that_fits_is_left_out(floor: float, state: float, activations: float) -> None:
    """Plans that take `state`, of which `floor` is the least, and an equal part of the activations."""

    def needed(count: int) -> float:
        return state + activations / count

    for budget in (state + 0.3, state + 1.0, state + 7.0):
        count = 1
        while needed(count) > budget:
            more = next_feasible_microbatches(count, needed(count), floor, budget)
            assert all(needed(count << i) > budget for i in range((more // count).bit_length() - 1))
            count = more


def test_estimates_scale_communication_with_fewer_micro_batches_and_computing_with_rematerialisation() -> None:
    many = ExecutionConfig(4)
    assert ExecutionConfig(1).scale(many, 6.0, 8.0) == pytest.approx(6.5)
    assert ExecutionConfig(4, LAYER).scale(many, 6.0, 8.0) == pytest.approx(10.0)
    assert many.scale(many, 6.0, 8.0) == 8.0 < ExecutionConfig(8).scale(many, 6.0, 8.0)
