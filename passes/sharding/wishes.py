"""Which argument each entry of `Manual` names, and which state follows a parameter.

State follows a parameter that has its shape and the longest end of its path: `state/opt_state/0/mu/Dense_0/kernel` has
the end `Dense_0/kernel` of `state/params/Dense_0/kernel`. If several parameters have it, they must agree.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from alpa_lite import paths
from alpa_lite.errors import OptionError
from alpa_lite.graph import Traced
from alpa_lite.manual import REGEX, Manual, dims_of, matches
from alpa_lite.methods import Method
from alpa_lite.passes.sharding.kinds import state_kinds
from alpa_lite.paths import shown, tokens
from alpa_lite.pins import Wish, Wishes


def manual(traced: Traced, method: Manual) -> dict[str, Wish]:
    """Stored path of an argument -> what the method says of it, state that follows a parameter included.

    Raises:
      OptionError: an entry names no argument, or a path is that of several, or two paths are those of one argument.
    """
    known = [argument.path for argument in traced.arguments]
    shapes = _shapes(traced)
    exact: dict[str, str] = {}
    found: dict[str, Wish] = {}
    own: dict[str, Wish] = {}
    for key, spec in method.specs:
        wish = Wish(dims_of(spec), f"Manual specs[{key!r}]={spec}")
        same = [] if key.startswith(REGEX) else paths.find(key, known)
        if len(same) > 1:
            raise OptionError(f"Manual names {key!r}, which is any of {', '.join(same)}; write one of these.")
        if same:
            other = exact.setdefault(same[0], key)
            if other != key:
                raise OptionError(f"Manual gives {shown(same[0])!r} two specs, as {other!r} and {key!r}; give one.")
            if not shapes[same[0]] and any(wish.dims):
                raise OptionError(f"Manual gives a spec for {shown(same[0])!r}, which is a scalar; leave it out.")
            own[same[0]] = wish
            continue
        some = [path for path in known if matches(key, shown(path))]
        if not some:
            raise OptionError(_nothing(key, known))
        found.update(dict.fromkeys(some, wish))
    return _followers(traced, found | own)


def of(traced: Traced, method: Method) -> Wishes:
    """All that the user says of a step.

    Raises:
      OptionError: an entry of `Manual` names no argument, or a path is ambiguous.
    """
    if not isinstance(method, Manual):
        return Wishes()
    found = manual(traced, method)
    return Wishes(names=method.names, leaves=found, given=frozenset(found))


def _followers(traced: Traced, named: Mapping[str, Wish]) -> dict[str, Wish]:
    """The same with the state that follows a named parameter."""
    kinds = state_kinds(traced)
    shapes = _shapes(traced)
    of_kind: dict[str, list[str]] = {"params": [], "optimizer": []}
    for number, kind in kinds.items():
        of_kind[kind].append(traced.arguments[number].path)
    ends: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for path in of_kind["params"]:
        ends.setdefault((shapes[path], tokens(path)[-1]), []).append(path)
    out = dict(named)
    for path in of_kind["optimizer"]:
        if path in named or not shapes[path]:
            continue
        like = ends.get((shapes[path], tokens(path)[-1]), [])
        common = {one: _common_end(one, path) for one in like}
        best = [one for one in like if common[one] == max(common.values())]
        wishes = {named.get(one) for one in best}
        if len(wishes) == 1 and (wish := wishes.pop()) is not None:
            out[path] = Wish(wish.dims, f"{wish.why}, which it follows as state of {shown(best[0])},")
    return out


def _common_end(one: str, other: str) -> int:
    """How many keys two paths have in common at their ends."""
    count = 0
    for a, b in zip(reversed(tokens(one)), reversed(tokens(other)), strict=False):
        if a != b:
            break
        count += 1
    return count


def _shapes(traced: Traced) -> dict[str, tuple[int, ...]]:
    values, inputs = traced.graph.values, traced.graph.block.inputs
    return {a.path: values[v].shape for a, v in zip(traced.arguments, inputs, strict=False)}


def _nothing(key: str, known: list[str]) -> str:
    """The message for an entry that names nothing."""
    printed = list(map(shown, known))
    wanted = key.removeprefix(REGEX) if key.startswith(REGEX) else paths.spellings(key)[-1]
    close = difflib.get_close_matches(wanted, printed, n=3, cutoff=0.3)
    hint = f"similar arguments are {', '.join(close)}" if close else f"its arguments are {', '.join(printed[:5])}"
    return f"Manual names {key!r}, which is no argument of the step; {hint}."
