"""Rows of results, a JSON file for each benchmark with a page beside it: several processes may add to them at once."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any


def known(path: Path, version: str) -> dict[str, Any]:
    """The rows of one version, by name; none where there are no results yet."""
    return json.loads(path.read_text() or "{}").get(version, {}) if path.exists() else {}


@contextlib.contextmanager
def changed(path: Path, page: Callable[[dict[str, Any]], str]) -> Iterator[dict[str, Any]]:
    """The rows of all versions, to change in place: others wait. Both files are written at the end.

    Args:
      path: the JSON file. The page is the file of the same name that ends with `.md`.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = json.loads(file.read() or "{}")
        yield rows
        file.truncate(0)
        file.write(json.dumps(rows, indent=0, sort_keys=True) + "\n")
        path.with_suffix(".md").write_text(page(rows))


def of_errors(title: str, steps: str, script: str, versions: Collection[str]) -> list[str]:
    """The head of a page of errors against one device, with a table of models to which rows are added.

    Args:
      steps: how many consecutive ones are compared, in words.
    """
    return [
        f"# {title}", "",
        f"The largest error of any leaf in {steps} consecutive steps; 1 is what is allowed. `python "
        f"benchmarks/{script}.py` says what is compared.", "",
        "| model | " + " | ".join(f"{version}: cases | largest error" for version in versions) + " |",
        "|---|" + "--:|--:|" * len(versions),
    ]  # fmt: skip
