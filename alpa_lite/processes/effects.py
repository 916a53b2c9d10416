"""The effects of the library on the process that uses it, and how a program declines them.

`docs/guide/process-effects.md` describes each of `EFFECTS`.
"""

from __future__ import annotations

import os
import sys
import time

from alpa_lite.errors import OptionError

DECLINE_VARIABLE = "ALPA_LITE_DECLINE"
"""The environment variable that names declined effects, separated by commas; `all` declines all of them."""

EFFECTS = ("gc", "jax", "stack", "excepthook", "atexit", "exit")


def is_allowed(effect: str) -> bool:
    """Returns whether the program has not declined one of `EFFECTS`.

    Raises:
      OptionError: the environment variable names an unknown effect.
    """
    given = os.environ.get(DECLINE_VARIABLE, "")
    declined = {name.strip() for name in given.split(",") if name.strip()}
    if not declined <= {*EFFECTS, "all"}:
        raise OptionError(f"{DECLINE_VARIABLE}={given!r}: give some of {', '.join(EFFECTS)}, or all")
    return not declined & {effect, "all"}


def exit_process(code: int, delay: float) -> None:
    """Ends the process at once, from any thread: no `finally` and no `atexit` runs.

    Args:
      delay: seconds to wait first. Process 0 takes the key-value store with it, so others may report until then.
    """
    time.sleep(delay)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
