"""Metadata of a checkpoint: its step, plan and versions, and the leaves that Orbax does not store as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
from etils import epath

from alpa_lite.errors import CheckpointError
from alpa_lite.plan import Plan
from alpa_lite.version import __version__

FORMAT, METADATA = "alpa_lite.checkpoint", "metadata/metadata"


@dataclass(frozen=True)
class Metadata:
    """Metadata of a checkpoint.

    Attributes:
      step: its number; None if it was saved without one.
      plan: the JSON of the plan that the state was sharded by, as `Plan.to_json` gives it; None if it was not given.
      fingerprint: the digest of that plan.
      jax, alpa_lite: the versions that saved it.
      keys: path of each leaf of typed random keys -> the name of their implementation. They are stored as their data.
      empty: path of each array without elements -> its shape, and the name of its dtype. They are not stored.
      user: metadata of the user.
    """

    step: int | None = None
    plan: Mapping[str, Any] | None = None
    fingerprint: str | None = None
    jax: str = ""
    alpa_lite: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    empty: Mapping[str, Any] = field(default_factory=dict)
    user: Any = None

    @staticmethod
    def create(step: int | None, plan: Plan | None, user: Any) -> Metadata:
        """The metadata of a new checkpoint, without `keys` and `empty`.

        Raises:
          CheckpointError: JSON cannot hold the metadata of the user.
        """
        try:
            json.dumps(user)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"metadata= is stored as JSON, which cannot hold it: {error}") from error
        planned = {} if plan is None else {"plan": plan.to_json(), "fingerprint": plan.fingerprint}
        return Metadata(step, jax=jax.__version__, alpa_lite=__version__, user=user, **planned)

    def load_plan(self) -> Plan | None:
        """The plan that the state was sharded by, for `parallelize(plan=...)`.

        Raises:
          PlanError: another version of alpa_lite wrote it.
        """
        return None if self.plan is None else Plan.from_json(dict(self.plan), "the plan of the checkpoint")

    def write(self, folder: epath.Path) -> None:
        """Writes the metadata into the folder of a checkpoint."""
        (folder / METADATA).parent.mkdir(exist_ok=True)
        (folder / METADATA).write_text(json.dumps({"format": FORMAT, **asdict(self)}))


def read_metadata(folder: epath.Path) -> Metadata:
    """The metadata of a checkpoint. JSON of other writers is the metadata of the user.

    Raises:
      CheckpointError: it is damaged.
    """
    path = folder / METADATA
    if not path.exists():
        return Metadata()
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            return Metadata(user=data)
        return Metadata(**data)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{METADATA} is damaged: {error}") from error
