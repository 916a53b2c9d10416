"""Files of calibrations as JSON: what is wrong with one, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from alpa_lite.errors import OptionError
from alpa_lite.ir import json_codec

FORMAT = "alpa-lite calibration"
VERSION = 2
REMEDY = "write it again with `alpa-lite calibrate`"

FileT = TypeVar("FileT")


def read(path: str | os.PathLike[str], make: Callable[[Any], FileT]) -> FileT:
    """Reads the data of a calibration file, and returns `make` of them.

    Raises:
      OptionError: the file cannot be read, is damaged, or has another version.
    """
    try:
        data = json_codec.read_json(Path(path))
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError("it is not a calibration")
        if data.get("version") != VERSION:
            raise ValueError(f"it has version {data.get('version')!r}, and {VERSION} is read")
        return make(data)
    except OSError as error:
        raise OptionError(f"the calibration {str(path)!r} cannot be read: {error.strerror}; {REMEDY}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OptionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise OptionError(f"the calibration {str(path)!r} is damaged: {what}; {REMEDY}") from error
