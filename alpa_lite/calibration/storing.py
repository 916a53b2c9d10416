"""The file of a calibration: JSON with a version, what was measured on what, the fits, and the cluster that follows."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa_lite.calibration import files
from alpa_lite.calibration.fitting import Fit
from alpa_lite.calibration.samples import Sample
from alpa_lite.cluster import Cluster


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

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "device": self.cluster.device,
            "jax": self.jax,
            "date": self.date,
            "seconds": self.seconds,
            "wanted": self.wanted,
            "cluster": self.cluster.to_json(),
            "fits": [fit.to_json() for fit in self.fits],
            "samples": [sample.to_json() for sample in self.samples],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """The calibration that `to_json` wrote. Raises what damaged data raise (`files.read` says it in one way)."""
        return cls(
            cluster=Cluster.from_json(data["cluster"]),
            fits=tuple(Fit(**fit) for fit in data["fits"]),
            samples=tuple(Sample.from_json(sample) for sample in data["samples"]),
            wanted=int(data["wanted"]),
            seconds=float(data["seconds"]),
            jax=str(data["jax"]),
            date=str(data["date"]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, and its folder if there is none. Raises OptionError if it cannot be written."""
        files.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file. Raises OptionError if it cannot be read, is damaged, or has another version."""
        return files.read(path, cls.from_json)


def default_path(cluster: Cluster) -> Path:
    """Where `alpa-lite calibrate` writes without `--out`: in `$XDG_CACHE_HOME`, by default ~/.cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    device = re.sub(r"[^a-z0-9]+", "-", cluster.device.lower()).strip("-")
    return home / "alpa_lite" / f"calibration-{device}-{cluster.num_devices}.json"
