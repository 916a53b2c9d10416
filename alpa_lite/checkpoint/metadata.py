"""What a checkpoint says of itself beside its arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from alpa_lite.checkpoint.trees import Plain
from alpa_lite.errors import CheckpointError
from alpa_lite.plan import Plan
from alpa_lite.version import __version__

FORMAT = "alpa_lite.checkpoint"


@dataclass(frozen=True)
class Metadata:
    """What a checkpoint says of itself.

    Attributes:
      step: its number; None if it was saved without one.
      plan: the JSON of the plan that the state lay under, as `Plan.to_json` gives it; None if it was not given.
      fingerprint: the digest of that plan.
      jax, alpa_lite: the versions that saved it.
      keys: path of each leaf of typed random keys -> the name of their implementation. They are stored as their data.
      empty: path of each array without elements -> its shape, and the name of its dtype. They are not stored.
      user: what the user added.
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
    def of(step: int | None, plan: Plan | None, plain: Plain, user: Any) -> Metadata:
        """That of a checkpoint that is saved now.

        Raises:
          CheckpointError: what the user adds is no JSON.
        """
        try:
            json.dumps(user)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"metadata= is stored as JSON, and this is none: {error}") from error
        return Metadata(
            step, None if plan is None else plan.to_json(), None if plan is None else plan.fingerprint,
            jax.__version__, __version__, dict(plain.keys), dict(plain.empty), user,
        )  # fmt: skip

    def load_plan(self) -> Plan | None:
        """The plan that the state lay under, for `parallelize(plan=...)`.

        Raises:
          PlanError: another version of alpa_lite wrote it.
        """
        return None if self.plan is None else Plan.from_json(dict(self.plan), "the plan of the checkpoint")

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def from_text(text: str) -> Metadata:
        """The inverse of `to_text`; of what others wrote, what they wrote as the user's own.

        Raises:
          ValueError, TypeError: the text is damaged.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            return Metadata(user=data)
        return Metadata(**data)
