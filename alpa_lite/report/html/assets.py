"""The style and the script of the page, which stand in it: nothing is loaded."""

from __future__ import annotations

STYLE = """
.alpa { color-scheme: light dark; --bg: #ffffff; --fg: #1b1f24; --dim: #57606a; --line: #d0d7de; --soft: #f3f5f7;
  --accent: #0b62c4; --c0: #2f6fb7; --c1: #7a5195; --c2: #c0508a; --c3: #2f8f6f; --c4: #b7791f; --c5: #6b7785;
  --c6: #a63d40; --c7: #4c8c9b;
  background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .alpa { --bg: #10151b; --fg: #e4e9ee; --dim: #9aa6b2; --line: #36414d;
  --soft: #1a2129; --accent: #74b3ff; --c0: #6aa5e8; --c1: #b290cf; --c2: #e889b9; --c3: #5fc29d; --c4: #dfa64f;
  --c5: #97a3b0; --c6: #e07a7d; --c7: #7fbecb; } }
.alpa * { box-sizing: border-box; }
.alpa main { max-width: 1180px; margin: 0 auto; padding: 1.2rem; }
.alpa h1 { font-size: 1.45rem; margin: 0 0 .2rem; } .alpa h2 { font-size: 1.12rem; margin: 2rem 0 .6rem; }
.alpa h3 { font-size: .95rem; margin: .8rem 0 .3rem; font-weight: 600; }
.alpa p { margin: .3rem 0; } .alpa ul { margin: .3rem 0; padding-left: 1.2rem; }
.alpa .dim { color: var(--dim); } .alpa code, .alpa pre { font-family: ui-monospace, monospace; font-size: .85em; }
.alpa nav a { margin-right: .9rem; } .alpa a { color: var(--accent); }
.alpa .skip { position: absolute; left: -999px; } .alpa .skip:focus { left: 1rem; top: .5rem; }
.alpa :focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.alpa .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: .7rem; margin: 1rem 0; }
.alpa .card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; background: var(--soft); }
.alpa .card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.alpa .card span { color: var(--dim); font-size: .85rem; }
.alpa .row { display: flex; flex-wrap: wrap; gap: 1.4rem; align-items: flex-start; }
.alpa svg { max-width: 100%; height: auto; } .alpa svg text { fill: var(--fg); font: 11px system-ui, sans-serif; }
.alpa svg .dim { fill: var(--dim); } .alpa svg .edge { stroke: var(--line); } .alpa svg .cut { stroke: var(--bg); }
.alpa .scroll { max-height: 30rem; overflow: auto; border: 1px solid var(--line); border-radius: 6px; }
.alpa table { border-collapse: collapse; width: 100%; font-size: .87rem; }
.alpa th, .alpa td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: middle; }
.alpa th { position: sticky; top: 0; background: var(--soft); z-index: 1; white-space: nowrap; }
.alpa th button { all: unset; cursor: pointer; font-weight: 600; }
.alpa th button:focus-visible { outline: 2px solid var(--accent); }
.alpa th[aria-sort=ascending] button::after { content: " \\25B2"; }
.alpa th[aria-sort=descending] button::after { content: " \\25BC"; }
.alpa .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.alpa td.path { font-family: ui-monospace, monospace; font-size: .82rem; overflow-wrap: anywhere; }
.alpa input { font: inherit; color: inherit; background: var(--bg); border: 1px solid var(--line); border-radius: 5px;
  padding: .2rem .5rem; min-width: 18rem; }
.alpa .bar { display: flex; height: 1.35rem; border-radius: 4px; overflow: hidden; background: var(--soft);
  border: 1px solid var(--line); }
.alpa .bar i { display: block; height: 100%; } .alpa .bars { display: grid; grid-template-columns: auto 1fr auto;
  gap: .35rem .8rem; align-items: center; }
.alpa .legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0; font-size: .87rem; padding: 0; }
.alpa .legend li { list-style: none; } .alpa .key { display: inline-block; width: .8rem; height: .8rem;
  border-radius: 2px; margin-right: .35rem; vertical-align: -1px; }
.alpa details summary { cursor: pointer; } .alpa pre { overflow: auto; background: var(--soft); padding: .8rem;
  border-radius: 6px; }
"""

SCRIPT = """
(() => {
  const root = document.currentScript.closest(".alpa");
  for (const field of root.querySelectorAll("input[data-table]")) {
    const table = root.querySelector("#" + CSS.escape(field.dataset.table));
    const count = root.querySelector("#" + CSS.escape(field.dataset.table + "-count"));
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\\s+/).filter(Boolean);
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every(word => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = shown + " rows";
    });
  }
  for (const button of root.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), table = button.closest("table"), at = head.cellIndex;
      const down = head.getAttribute("aria-sort") === (head.classList.contains("number") ? "descending" : "ascending");
      const order = head.classList.contains("number") === down ? 1 : -1;
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order === 1 ? "ascending" : "descending");
      const key = row => {
        const cell = row.cells[at];
        return cell.dataset.key === undefined ? cell.textContent : +cell.dataset.key;
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const x = key(a), y = key(b);
        return order * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
      });
      table.tBodies[0].append(...rows);
    });
  }
})();
"""
