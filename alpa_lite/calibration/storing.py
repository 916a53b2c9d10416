"""The file of a calibration: JSON with a version, what was measured on what, the fits, and the cluster that follows."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
from dataclasses import dataclass
from pathlib import Path

from alpa_lite.calibration import files
from alpa_lite.calibration.fitting import Fit
from alpa_lite.calibration.samples import Sample
from alpa_lite.cluster import Cluster
from alpa_lite.ir import json_codec


@dataclass(frozen=True)
class Calibration:
    """The results of measuring devices.

    Attributes:
      cluster: the devices, with the measured parameters.
      fits: the parameters and their errors.
      samples: the measurements.
      wanted: how many samples there would be with more time.
      seconds: how long it took.
      jax: the version of JAX.
      date: when, in ISO format.
    """

    cluster: Cluster
    fits: tuple[Fit, ...]
    samples: tuple[Sample, ...]
    wanted: int
    seconds: float
    jax: str
    date: str

    @classmethod
    def now(
        cls, cluster: Cluster, fits: tuple[Fit, ...], samples: tuple[Sample, ...], wanted: int, seconds: float
    ) -> Calibration:
        """The calibration of this moment and this JAX."""
        import jax

        date = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
        source = f"measured on {date[:10]} with JAX {jax.__version__}; else: {cluster.source}"
        cluster = dataclasses.replace(cluster, source=source)
        return cls(cluster, fits, samples, wanted, seconds, jax.__version__, date)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, and its folder if there is none. Raises OptionError if it cannot be written."""
        files.write(path, {"device": self.cluster.device, **json_codec.encode_fields(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file. Raises OptionError if it cannot be read, is damaged, or has another version."""
        names = [field.name for field in dataclasses.fields(cls)]
        return files.read(path, lambda data: json_codec.decode_fields(cls, {name: data[name] for name in names}))


def default_path(cluster: Cluster) -> Path:
    """Where `alpa-lite calibrate` writes without `--out`: in `$XDG_CACHE_HOME`, by default ~/.cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    device = re.sub(r"[^a-z0-9]+", "-", cluster.device.lower()).strip("-")
    return home / "alpa_lite" / f"calibration-{device}-{cluster.num_devices}.json"
