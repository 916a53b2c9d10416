"""Plans on disk: a step that was planned once, in any process, is not planned again.

A file holds a plan and its key (`key_of`): the program as traced, the roles of its arguments, their shardings and the
user's constraints on them, the options that matter, the rules of its operations, the cluster, and the versions of JAX
and of this library. The name of the file is a digest of the key. On a hit the plan is replayed: the step is divided and
lowered as in the plan, without solving, and its seconds and bytes are compared with those that were written. A plan
that cannot be read, has another key, or replays with other figures is planned again and written anew, with a warning.
Files are replaced whole, so that several processes may share a directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from alpa_lite import _jax
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.errors import PlanError
from alpa_lite.ir import json_codec
from alpa_lite.options import Options
from alpa_lite.passes.ir.keys import Keys, digest
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan.plan import SCHEMA, Plan
from alpa_lite.version import __version__

logger = logging.getLogger(__name__)

VARIABLE = "ALPA_LITE_CACHE_DIR"
"""The environment variable that names the directory where `cache_dir` is not given."""

ROUNDING = 1e-9
"""The largest relative difference of the seconds of a replayed step from those written."""


class PlanCache:
    """The file of one planning.

    Attributes:
      key: what the plan is the answer to, each part as text.
      path: of the file.
    """

    def __init__(self, directory: Path, key: Mapping[str, str]) -> None:
        self.key = dict(key)
        name = hashlib.blake2b(json.dumps(self.key, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.path = directory / f"{name}.json"

    def load(self) -> Plan | None:
        """Returns the plan of the file; None if there is none, or with a warning if it cannot be used."""
        try:
            data = json_codec.read_json(self.path)
            if not isinstance(data, dict) or data.get("key") != self.key:
                raise PlanError("it is of another program, version, cluster or request")
            return Plan.from_json(data.get("plan"), f"the file {str(self.path)!r}")
        except FileNotFoundError:
            return None
        except PlanError as error:
            self.refuse(str(error))
        except (OSError, json_codec.DecodeError) as error:
            self.refuse(f"it cannot be read ({error})")
        return None

    def refuse(self, why: str) -> None:
        """Says why the plan of the file is not used."""
        logger.warning("the cached plan %s is not used, and planned again: %s", self.path, why)

    def save(self, plan: Plan) -> None:
        """Writes the plan; a failure to write is only a warning, since the plan itself is good."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            json_codec.write_json(self.path, {"key": self.key, "plan": plan.to_json()}, indent=None)
        except OSError as error:
            logger.warning("the plan cannot be kept as %s: %s", self.path, error)


def cache_of(step: Step, request: PlanRequest) -> PlanCache | None:
    """Returns the file of a planning; None where no directory is named, or a plan is given."""
    directory = request.options.cache_dir or os.environ.get(VARIABLE)
    if not directory or request.options.plan is not None:
        return None
    return PlanCache(Path(directory).expanduser(), key_of(step, request))


def key_of(step: Step, request: PlanRequest) -> dict[str, str]:
    """Everything that a plan depends on, each part as text: equal in every process, without addresses or paths."""
    traced, options = step.traced, request.options
    values, inputs = traced.graph.values, traced.graph.block.inputs
    arguments = [
        f"{argument.path} {argument.role} {values[number].dtype}{list(values[number].shape)}"
        for argument, number in zip(traced.arguments, inputs, strict=False)
    ]
    results = [f"{output.path} {output.role}" for output in traced.outputs]
    rules = sorted(f"{key}: {rule.factors} {rule.operands} {rule.results}" for key, rule in step.rules.items())
    return {
        "program": digest(traced.graph, constants=False),
        "arguments": _hash("\n".join([*arguments, *results, str(traced.state), str(traced.has_named_batch)])),
        "rules": _hash("\n".join(rules)),
        "pins": _hash(Keys().text(request.pins)),
        "wishes": _hash(Keys().text(request.wishes)),
        "state_from": "" if request.like is None else request.like.fingerprint,
        "options": _options(options),
        "memory per device": f"{request.budget:.0f}",
        "cluster": request.cluster.fingerprint,
        "settings": "" if traced.calling is None else Keys().text(_jax.settings_text(traced.calling.settings)),
        "jax": jax.__version__,
        "alpa_lite": f"{__version__}, plans {SCHEMA}",
    }


def check_same(plan: Plan, staged: Staged, budget: float) -> None:
    """Raises PlanError unless a replayed step takes the seconds and bytes that its plan says, within the budget."""
    seconds, wanted = staged.seconds, plan.step_seconds
    if abs(seconds - wanted) > ROUNDING * wanted:
        raise PlanError(f"it takes {seconds} s a step when it is replayed, and {wanted} s as written")
    sizes = list(zip(plan.division.buffer_bytes, plan.division.temporary_bytes, strict=True))
    if [tuple(pair) for pair in staged.bytes] != sizes:
        raise PlanError(f"its submeshes need {list(staged.bytes)} bytes when it is replayed, and {sizes} as written")
    if staged.needed_bytes > budget:
        raise PlanError(f"it needs {staged.needed_bytes:,} bytes per device, of {budget:,.0f}")


def _options(options: Options) -> str:
    kept = [field.name for field in dataclasses.fields(options) if field.metadata["keyed"]]
    return "; ".join(f"{name}={Keys().text(getattr(options, name))}" for name in sorted(kept))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
