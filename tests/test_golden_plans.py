"""Plans are those that are stored: see `golden_plans`."""

import json

import pytest

from tests import golden_plans
from tests.marks import slow_but


@pytest.mark.parametrize("name", slow_but(golden_plans.QUICK, golden_plans.CASES))
def test_the_plan_is_the_golden_one(name: str) -> None:
    """On a version of JAX without stored plans this fails: store them with `python -m tests.golden_plans --write`."""
    known = json.loads(golden_plans.stored().read_text())[name]
    assert golden_plans.plan_case(name) == known
