"""What each process has found, told to all."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax

from alpa_lite.errors import ProcessError
from alpa_lite.processes.store import Store, timeout

_calls = itertools.count()


def gathered(value: Any, what: str) -> list[Any]:
    """The values of all processes, by their numbers. All must call it, and the same number of times.

    Args:
      value: that JSON can write.
      what: names it in an error.

    Raises:
      ProcessError: a process did not come in time; names it.
    """
    if jax.process_count() == 1:
        return [value]
    store = Store(f"gathered/{next(_calls)}")
    store.put(str(jax.process_index()), json.dumps(value))
    found = []
    for process in range(jax.process_count()):
        text = store.get(str(process), timeout())
        if text is None:
            raise ProcessError(
                f"process {process} did not come to {what} within {timeout():g} s: all processes must call it; raise "
                "ALPA_LITE_PROCESS_TIMEOUT if it is only slow"
            )
        found.append(json.loads(text))
    return found
