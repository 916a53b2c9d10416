"""Says when a call has to move state that should stay where it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite.paths import shown
from alpa_lite.report import units
from alpa_lite.runtime import placement

logger = logging.getLogger(__name__)


def warn(
    name: str, leaves: Sequence[Any], shardings: Sequence[NamedSharding], paths: Sequence[str], first: bool
) -> None:
    """Logs a warning with the bytes of state that lies elsewhere than the plan wants it.

    Args:
      name: of the step.
      leaves: state and frozen weights of a call.
      shardings: where the plan wants each.
      paths: of each.
      first: whether this is the first call: then arrays of the host and of one device are what it is there to place,
        and only what lies on several devices counts.
    """
    moved = [
        (leaf.nbytes, path)
        for leaf, sharding, path in zip(leaves, shardings, paths, strict=True)
        if not placement.is_placed(leaf, sharding)
        and hasattr(leaf, "nbytes")
        and (not first or (isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1))
    ]
    if moved:
        size, path = max(moved)
        logger.warning(
            "%s moves %s of state in this call: %s leaves do not lie as its plan wants them, the largest of them "
            "%s of %s. Pass on what the last call returned, or what step.place or step.init returned",
            name, units.exact_bytes(sum(size for size, _ in moved)), len(moved), shown(path), units.nbytes(size),
        )  # fmt: skip
