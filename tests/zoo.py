"""The models that every plan must compute correctly: small training steps, each for something that can go wrong.

`CASES` lists them all; `get` finds one by name. Nothing here knows of alpa_lite.
"""

from tests import zoo_linen, zoo_nnx, zoo_plain
from tests.zoo_base import Case

CASES: list[Case] = [*zoo_nnx.CASES, *zoo_linen.CASES, *zoo_plain.CASES]
FUNCTIONAL: list[Case] = [case for case in CASES if case.style == "functional"]


def get(name: str) -> Case:
    """The case called `name`."""
    return next(case for case in CASES if case.name == name)
