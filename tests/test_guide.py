"""Every block of Python code in the user's guide runs, page by page, as a reader would type it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow_but

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
FIRST = GUIDE / "first-model.md"
FAST = ("donation",)
PAGES = [page.stem for page in sorted(GUIDE.glob("*.md")) if "```python" in page.read_text(encoding="utf-8")]


def blocks(page: Path) -> list[str]:
    """The Python code of a page, with empty lines in front, so that a traceback has the line of the page."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return ["\n" * (text[: match.start()].count("\n") + 1) + match[1] for match in found]


def script(page: Path) -> str:
    """A program that runs a page's blocks in one namespace, after the setup with which the first page begins."""
    parts = [(FIRST, blocks(FIRST)[0])] if page != FIRST else []
    parts += [(page, block) for block in blocks(page)]
    runs = [f"exec(compile({code!r}, {str(path)!r}, 'exec'), space)" for path, code in parts]
    return "\n".join(["space = {'__name__': 'page'}", *runs]) + "\n"


@pytest.mark.parametrize("name", slow_but(FAST, PAGES))
def test_the_blocks_of_a_page_run_in_order(name: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(script(GUIDE / f"{name}.md"), encoding="utf-8")
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR", "XLA_FLAGS")}
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=kept | quick, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_block_of_code_is_run_or_no_python() -> None:
    """A block of another name would not be run: only shells' commands, differences and output may have one."""
    for page in GUIDE.glob("*.md"):
        names = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(names) <= {"", "python", "diff", "text", "shell"}, page.name
        assert names[1::2] == [""] * (len(names) // 2) and "" not in names[::2], page.name


def test_a_block_that_fails_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nvalue = 1\n```\n\n```python\nassert value == 2, 'line eight'\n```\n")
    assert [block.count("\n") for block in blocks(page)] == [4, 8]
    space: dict[str, object] = {}
    with pytest.raises(AssertionError, match="line eight"):
        for block in blocks(page):
            exec(block, space)
