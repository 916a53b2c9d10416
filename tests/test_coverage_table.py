"""The coverage table of the differential test is committed, names every feature that is generated, and only grows."""

from __future__ import annotations

import collections
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import AT
from benchmarks.numerics import differential
from benchmarks.random_steps import contests

TABLE = differential.BENCHMARKS[0].path
FEATURES = ("reference", "effect", "ordered effect", "whole-batch loop", "low-bit type", "returned array in two places")


def committed(back: int) -> dict[str, dict[str, int]]:
    """Features by count for each version, as of the commit that changed the table `back` changes ago."""
    run = ["git", "-C", str(Path(__file__).parents[1])]
    name = "benchmarks/results/differential.json"
    log = subprocess.run([*run, "log", "--format=%H", "--", name], capture_output=True, text=True, check=False)
    commits = log.stdout.split()
    if len(commits) <= back:
        pytest.skip("the history of the table is not in this checkout")
    text = subprocess.run([*run, "show", f"{commits[back]}:{name}"], capture_output=True, text=True, check=True)
    return {version: row["kinds"] for version, row in json.loads(text.stdout).items() if version != "faults"}


def test_the_table_only_grows() -> None:
    now = {version: row["kinds"] for version, row in json.loads(TABLE.read_text()).items() if version != "faults"}
    for back in (0, 1):
        for version, kinds in committed(back).items():
            fewer = {kind for kind, count in kinds.items() if now.get(version, {}).get(kind, 0) < count}
            assert not fewer, (version, fewer)


def test_the_table_has_every_feature() -> None:
    known = json.loads(TABLE.read_text())
    total: collections.Counter[str] = collections.Counter()
    for version, row in known.items():
        total.update({} if version == "faults" else row["kinds"])
    settings = [f"setting: {name}" for name in contests.SETTINGS]
    assert not {feature for feature in (*FEATURES, *settings) if not total[feature]}


def test_counts_are_added() -> None:
    rows: dict[str, dict[str, dict[str, int]]] = {}
    for seeds in ("0-2", "2-4"):
        counts = differential.Counts(kinds=collections.Counter({"effect": 2}))
        differential.added(rows, f"{seeds}{AT}jax 1", vars(counts))
    assert rows["jax 1"]["kinds"] == {"effect": 4}
