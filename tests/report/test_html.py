"""The page of a plan: one file that loads nothing, right in a real browser, dark and light, by keyboard too."""

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite.plan.figures import OpCost, Products, Residual
from alpa_lite.plan.plan import Plan
from alpa_lite.report import operations, stages
from alpa_lite.report.html import MAX_CELL_BYTES, document, fragment
from tests.plans import gpt_plan, pipeline_plan, with_comparisons

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000",
)  # fmt: skip
VOID = {"input", "meta", "br"}


def full(plan: Plan) -> Plan:
    """With what only the compiler fills in."""
    held = (Residual("gpt.py:57 (GPT.__call__) jvp(h_0)/attn", "dot_general", (64, 8), "float32", P("data"), 512, 2),)
    spending = (
        OpCost("gpt.py:57 (GPT.__call__) jvp(GPT)/h_#/attn", "dot_general", 8e-3),
        OpCost("gpt.py:57 (GPT.__call__) transpose(jvp(GPT))/h_#/attn", "dot_general", 16e-3),
        OpCost("train.py:9 (train_step)", "mul", 1e-3),
    )
    stages = tuple(dataclasses.replace(stage, held=held, spending=spending) for stage in plan.stages)
    return with_comparisons(dataclasses.replace(plan, stages=stages, products=Products(1e12, 1.25e14)))


class Reader(html.parser.HTMLParser):
    """Checks that elements are closed in order, and collects their ids and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "plan", [full(gpt_plan()), full(pipeline_plan()), gpt_plan(2)], ids=["mesh", "pipeline", "bare"]
)
def test_is_one_wellformed_file_that_loads_nothing(plan: Plan) -> None:
    text = document(plan)
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open and len(reader.ids) == len(set(reader.ids))
    assert not any(name in ("src", "srcset") or (value or "").startswith("//") for name, value in reader.attributes)
    links = [value or "" for name, value in reader.attributes if name == "href"]
    assert {link[1:] for link in links} <= set(reader.ids) and all(link.startswith("#") for link in links)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_says_what_the_summary_says_and_escapes() -> None:
    plan = full(gpt_plan())
    text = document(dataclasses.replace(plan, notes=("<b>bold</b> & 'quoted'",)))
    for wanted in ("slower by 25 %", "does not fit by 3.00 GiB", "tokens a second", "3.16 GiB", "h_#/attn"):
        assert wanted in text, wanted
    assert "jvp(h_0)/attn" in text and "state/params/h_{0-11}/mlp/up/kernel" in text
    assert "<b>bold" not in text and "&lt;b&gt;bold&lt;/b&gt; &amp; &#39;quoted&#39;" in text
    assert "submesh 3" in fragment(full(pipeline_plan()))


def test_identical_layers_and_collectives_are_one_row_and_the_largest_come_first() -> None:
    assert len(document(full(gpt_plan(96)))) < 1.1 * len(document(full(gpt_plan(12))))
    text = document(full(gpt_plan()))
    rows = re.findall(r"<tr>(.*?)</tr>", text.split('id="tensors-table"')[1].split("</table>")[0], re.DOTALL)[1:]
    per_device = [int(re.findall(r'data-key="(\d+)"', row)[-1]) for row in rows]
    assert per_device == sorted(per_device, reverse=True) and len(rows) == 26
    assert text.count("reduce_scatter</td>") == 1


def test_cells_of_a_notebook_are_small_and_share_no_id() -> None:
    many = full(pipeline_plan("interleaved-1f1b", 3))
    stage = many.stages[0]
    leaves = tuple(
        dataclasses.replace(leaf, path=f"{leaf.path}.{chr(97 + i % 26)}", shape=(i, 7), bytes=28 * i)
        for i, leaf in enumerate(stage.arguments * 4)
    )
    first = tuple(dataclasses.replace(other, arguments=leaves[n:]) for n, other in enumerate(many.stages[:3]))
    large = dataclasses.replace(many, stages=(*first, *many.stages[3:]))
    for plan in (many, large):
        readers = [Reader(), Reader()]
        for reader in readers:
            cell = plan._repr_html_()
            assert len(cell.encode()) <= MAX_CELL_BYTES
            reader.feed(cell)
        assert readers[0].ids and not set(readers[0].ids) & set(readers[1].ids)
    assert len(document(large).encode()) > MAX_CELL_BYTES
    assert "more rows, which plan.to_html(path) shows" in large._repr_html_()


def test_modules_have_the_seconds_of_their_operations() -> None:
    plan = full(gpt_plan())
    rows = {row.name: row for row in operations.modules(plan)}
    assert list(rows["GPT/h_#/attn"].times.values())[:2] == [8e-3, 16e-3]
    assert rows["train_step"].times["backward and update"] == 1e-3
    total = sum(s.seconds for s in plan.stages[0].spending) + sum(plan.collective_seconds)
    assert sum(row.seconds for row in rows.values()) == pytest.approx(total)


def browse(file: Path, *flags: str, width: int = 1200) -> dict:
    """What the probe reports from a page in headless Chromium."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={file.parent / ('profile' + ''.join(flags) + str(width))}"
    command = [CHROMIUM, *FLAGS, *flags, profile, f"--window-size={width},900", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    return json.loads(match[1])


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize(("plan", "width"), [(full(gpt_plan()), 1200), (full(pipeline_plan()), 900)])
def test_works_in_a_browser(plan: Plan, width: int, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    plan.to_html(file)
    probe = (Path(__file__).parent / "probe.html").read_text(encoding="utf-8")
    file.write_text(file.read_text().replace("<head>", f"<head>{probe}"))
    light, dark = browse(file, width=width), browse(file, "--blink-settings=preferredColorScheme=0", width=width)
    for page in (light, dark):
        assert page["errors"] == [] and page["resources"] == 0 and page["empty"] == 0 and page["overflow"] <= 0
        assert page["cut"] == 0
    assert light["members"] == sum(
        len(plan.stages[first].arguments) for first, *_ in stages.group_identical_stages(plan)
    )
    assert light["focused"] and light["button"]
    assert light["found"] == 4 and light["said"] == "4 rows"  # up and down: parameters, and both moments together
    assert light["sort"] == "descending" and light["sorted"]
    assert light["colours"] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert dark["colours"] == ["rgb(16, 21, 27)", "rgb(228, 233, 238)"]
