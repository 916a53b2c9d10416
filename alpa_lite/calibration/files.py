"""Files of calibrations as JSON: what is wrong with one, and what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from alpa_lite.errors import OptionError

FORMAT = "alpa-lite calibration"
VERSION = 2
REMEDY = "write it again with `alpa-lite calibrate`"

Read = TypeVar("Read")


def read(path: str | os.PathLike[str], make: Callable[[Any], Read]) -> Read:
    """Reads the data of a calibration file, and returns `make` of them.

    Raises:
      OptionError: the file cannot be read, is damaged, or has another version.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError("it is no calibration")
        if data.get("version") != VERSION:
            raise ValueError(f"it has version {data.get('version')!r}, and {VERSION} is read")
        return make(data)
    except OSError as error:
        raise OptionError(f"the calibration {str(path)!r} cannot be read: {error.strerror}; {REMEDY}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OptionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise OptionError(f"the calibration {str(path)!r} is damaged: {what}; {REMEDY}") from error


def write(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Writes data, and the folder of the file if there is none.

    Raises:
      OptionError: it cannot be written.
    """
    text = json.dumps({"format": FORMAT, "version": VERSION, **data}, indent=1)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"the calibration {str(path)!r} cannot be written: {error.strerror}") from error
