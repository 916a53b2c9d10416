"""Text: real, deterministic, and shifted by one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from alpa_lite.models import text


def test_batches_are_windows_of_the_text_and_targets_follow_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 200)))
    data = text.read([tmp_path / "a.txt", str(tmp_path / "b.txt")])
    np.testing.assert_array_equal(data, np.arange(200))
    for batch in islice(text.batches(data, 4, 10, seed=1), 50):
        assert batch["inputs"].shape == batch["targets"].shape == (4, 10)
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
        np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)  # bytes count up in this text


def test_every_window_is_reached() -> None:
    data = np.arange(12, dtype=np.uint8)
    starts = {int(row) for batch in islice(text.batches(data, 8, 10), 20) for row in batch["inputs"][:, 0]}
    assert starts == {0, 1}


def test_the_same_seed_gives_the_same_batches() -> None:
    data = text.read()
    runs = [[b["inputs"] for b in islice(text.batches(data, 8, 64, seed), 5)] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.any(np.asarray(runs[0]) != np.asarray(runs[2]))


def test_the_default_text_is_the_standard_library() -> None:
    data = text.read()
    assert len(data) > 1_000_000
    np.testing.assert_array_equal(data, text.read())
    assert b"def dedent(" in data.tobytes() and data.max() < text.VOCAB


def test_short_empty_and_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seq=10 needs a text of at least 11 bytes, but it has 10"):
        text.batches(np.zeros(10, np.uint8), 2, 10)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt.*hold no bytes"):
        text.read([tmp_path / "empty.txt"])
    with pytest.raises(FileNotFoundError):
        text.read([tmp_path / "absent.txt"])
