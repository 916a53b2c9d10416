"""The pipelines that were compared with the chosen one, as a plan lists them."""

from __future__ import annotations

from alpa_lite.passes.stages.choosing import StagePlan
from alpa_lite.passes.stages.refusals import microbatches
from alpa_lite.plan.records import Candidate


def of_stages(chosen: StagePlan) -> tuple[Candidate, ...]:
    """Every schedule with every number of micro-batches that the stage DP compared, with its estimates."""
    out = []
    for weighed in chosen.weighed:
        twice = f" with {weighed.virtual} stages per submesh" if weighed.virtual > 1 else ""
        name = f"{weighed.schedule}{twice}, {microbatches(weighed.num_microbatches)}"
        shape = (weighed.num_stages,) if weighed.num_stages is not None else ()
        size = None if weighed.bytes is None else int(weighed.bytes)
        out.append(Candidate(name, shape, weighed.seconds, size, weighed.status))
    return tuple(out)
