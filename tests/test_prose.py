"""Docstrings and pages read like those of the field: how sentences begin, and words that have a technical form."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import PAGES
from tests.test_house import KNOWN

ROOT = Path(__file__).parents[1]

RELATIVE = re.compile(r"(?:^|(?<=[.!?:])\s+)(What|That which|Whatever|Of several)\b")
"""How no sentence of a docstring or page begins."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, its classes, functions and constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            match one:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield one.lineno, text.strip()


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_docstrings_name_their_subject(name: str) -> None:
    """No first sentence has a relative clause with "what", and no sentence begins with one."""
    for line, text in docstrings(KNOWN[name]):
        where = f"{KNOWN[name].relative_to(ROOT)}:{line}: {first_sentence(text)}"
        assert not RELATIVE.search(text), where
        assert not re.search(r"\bwhat\b", first_sentence(text)), where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_of_pages_name_their_subject(page: Path) -> None:
    """Questions may begin with "What"."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(("#", "|", "    ")):
            continue
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z])", " ".join(paragraph.split())):
            assert not (RELATIVE.match(sentence) and not sentence.endswith("?")), f"{page.name}: {sentence}"


EVERYDAY = re.compile(r"\b(heeded|lies?|anew|beside|born|told|whatever|so many)\b|(?<!there) is no (?!longer)")
"""Words of errors, notes and reports that have a technical form, such as "is placed" for "lies"."""

INGREDIENTS = {"heeded", "state gathered anew for late uses"}
"""Texts that fingerprints of stored plans are made of."""


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_messages_use_technical_words(name: str) -> None:
    tree = ast.parse(KNOWN[name].read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in texts and text not in INGREDIENTS:
                assert not EVERYDAY.search(text), f"{KNOWN[name].relative_to(ROOT)}:{node.lineno}: {text}"
