"""The parts of a place in a program: the user's source line and function, and JAX's name stack, as plans write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PLACE = re.compile(r"(\S+:\d+)?(?: ?\((\S+)\))?\s*(.*)", re.DOTALL)
_TRANSFORMS = re.compile(r"\b(?:transpose|jvp|vmap|remat|checkpoint|jit|pjit|custom_jvp|custom_vjp|linearize)\(")
_MARKS = ("forward", "backward", "rematted_computation", "checkpoint")


@dataclass(frozen=True)
class Place:
    """A place in a program.

    Attributes:
      line: the source line, such as "gpt.py:57"; empty if it is not known.
      function: of that line.
      scope: the name stack, such as "transpose(jvp(GPT))/h_3/attn", or a remark where there is no line.
    """

    line: str
    function: str
    scope: str

    @staticmethod
    def of(where: str) -> Place:
        """Returns the parts of a text that `_jax.where` wrote."""
        match = _PLACE.fullmatch(where)
        return Place(match[1] or "", match[2] or "", match[3]) if match else Place("", "", where)

    @property
    def source(self) -> str:
        """The source line with its function."""
        return f"{self.line} ({self.function})" if self.function else self.line

    @property
    def stack(self) -> str:
        """The name stack alone, without the layout behind it."""
        return self.scope.partition(" -> ")[0].partition(" ")[0] if " -> " in self.scope else self.scope

    @property
    def backward(self) -> bool:
        """Whether it is in the reverse pass."""
        return "transpose" in self.stack or "backward" in self.stack

    @property
    def forward(self) -> bool:
        """Whether it is differentiated, and not in the reverse pass; neither is so for the update."""
        return not self.backward and ("jvp" in self.stack or "forward" in self.stack)

    @property
    def module(self) -> str:
        """The Flax scope, with layers as one; else the function, or the line.

        Scopes of JAX's own functions say less than the function that called them: `_where`, an einsum's subscripts.
        """
        parts = _TRANSFORMS.sub("", self.stack).replace(")", "").split("/")
        own = [part for part in parts if part and part not in _MARKS and not part.startswith("_") and "->" not in part]
        return re.sub(r"\d+", "#", "/".join(own)) or self.function or self.line or "other"
