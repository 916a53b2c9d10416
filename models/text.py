"""Real text to train on, wherever Python is: the sources of its standard library, byte by byte, without a network."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

VOCAB = 256


def batches(data: np.ndarray, batch: int, seq: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of random windows of the text; the same for the same seed.

    Args:
      data: the text as one row of tokens, from `read`.
      batch: windows in a batch.
      seq: tokens in a window.
      seed: of the windows' positions.

    Yields:
      "inputs" (batch, seq) int32, and "targets", the tokens that follow them.

    Raises:
      ValueError: if the text is shorter than one window and its last target.
    """
    if len(data) <= seq:
        raise ValueError(f"seq={seq} needs a text of at least {seq + 1} bytes, but it has {len(data)}; give more files")
    return _windows(data, batch, seq, np.random.default_rng(seed))


def read(files: Sequence[str | Path] | None = None) -> np.ndarray:
    """The bytes of `files`, joined in the given order, as a row of uint8; by default the standard library's modules.

    Raises:
      FileNotFoundError: if a file is missing, or if this Python has no sources of its standard library.
      ValueError: if the files hold nothing.
    """
    paths = standard_library() if files is None else [Path(file) for file in files]
    data = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    if not len(data):
        raise ValueError(f"files={list(map(str, paths))} hold no bytes; name files with text")
    return data


def standard_library() -> list[Path]:
    """Returns the source files of the top-level modules of Python's standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))
    if not paths:
        raise FileNotFoundError(f"no Python sources in {folder}; name text files instead")
    return paths


def _windows(data: np.ndarray, batch: int, seq: int, rng: np.random.Generator) -> Iterator[dict[str, np.ndarray]]:
    offsets = np.arange(seq + 1)
    while True:
        starts = rng.integers(0, len(data) - seq, batch)
        window = data[starts[:, None] + offsets].astype(np.int32)
        yield {"inputs": window[:, :-1], "targets": window[:, 1:]}
