"""Paths of arguments and results: how they are stored, how they are printed, and what is accepted for them.

stored   `state['params']['layers'][0]['w']`: the parameter's name, then `jax.tree_util.keystr` of the leaf. It can be
         evaluated and belongs to one leaf only, so graphs and plan files hold it.
printed  `state/params/layers/0/w`: the same keys after slashes, as `keystr(..., simple=True, separator="/")` writes
         them and as Flax and Orbax name the leaves of a checkpoint. It is shorter, it reads the same for dicts,
         sequences and attributes, and layers can be written as a range: `layers/{0-11}/w`. Every table, note and
         message shows this notation. A slice of a leaf keeps its brackets: `state/params/layers/w[0:3]`.
accepted both of them, by `Manual`, `Plan.explain` and `alpa-lite explain`.

Two leaves can only be printed the same if a key itself holds a slash, or if keys differ in type alone (`0` and `"0"`).
Then the stored notation tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_TOKEN = re.compile(
    r"""\['(?:[^'\\]|\\.)*'\] | \["(?:[^"\\]|\\.)*"\] | \[[^\]]*\] | \.\w+ | ^[^.\[]+ | .""", re.DOTALL | re.VERBOSE
)
_SLICE = re.compile(r"\[\d+:\d+\]")


def tokens(path: str) -> tuple[str, ...]:
    """The keys of a stored path as they are written: "state['a'][0].mu" gives ("state", "['a']", "[0]", ".mu")."""
    return tuple(_TOKEN.findall(path))


def format_path(path: str | Iterable[str]) -> str:
    """Returns a stored path, or some of its tokens, as it is printed: "state['a'][0].mu" gives "state/a/0/mu"."""
    out = ""
    for token in tokens(path) if isinstance(path, str) else path:
        out += token if _SLICE.fullmatch(token) else f"/{_key(token)}"
    return out.removeprefix("/")


def keys(path: str) -> tuple[str, ...]:
    """Returns the keys of a stored path, as they are printed: "state['a'][0].mu" gives ("state", "a", "0", "mu").

    A slice of a leaf keeps its brackets.
    """
    return tuple(token if _SLICE.fullmatch(token) else _key(token) for token in tokens(path))


def spellings(name: str) -> tuple[str, ...]:
    """Returns the printed forms that a typed path may stand for: itself, and those of it as a stored path."""
    mixed = "/".join(format_path(part) for part in name.strip().split("/"))
    return tuple(dict.fromkeys(text.strip("/") for text in (name.strip(), format_path(name.strip()), mixed)))


def find(name: str, known: Iterable[str]) -> list[str]:
    """Returns the stored paths that `name` stands for: the one that it is, or else all that are printed as it is."""
    paths = list(known)
    if name in paths:
        return [name]
    forms = spellings(name)
    return [path for path in paths if format_path(path) in forms]


def _key(token: str) -> str:
    if token.startswith(("['", '["')):
        return token[2:-2]
    return token[1:-1] if token.startswith("[") and token.endswith("]") else token.removeprefix(".")
