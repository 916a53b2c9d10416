"""The committed coverage table of the differential test names every feature that is generated."""

from __future__ import annotations

import collections
import json

from benchmarks import differential_results, random_further

FEATURES = ("reference", "effect", "ordered effect", "whole-batch loop", "low-bit type", "returned array in two places")


def test_the_table_has_every_feature() -> None:
    known = json.loads((differential_results.RESULTS / "differential.json").read_text())
    total: collections.Counter[str] = collections.Counter()
    for version, row in known.items():
        total.update({} if version == "faults" else row["kinds"])
    settings = [f"setting: {name}" for name in random_further.SETTINGS]
    assert not {feature for feature in (*FEATURES, *settings) if not total[feature]}
