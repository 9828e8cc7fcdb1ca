"""The look of our pages: one style sheet, no scripts from elsewhere, readable from a phone to a wide screen."""

import html
from collections.abc import Iterable

_CSS = """
:root { --bg:#ffffff; --fg:#1c2330; --soft:#5b6575; --line:#dde2ea; --card:#f6f8fb; --accent:#2456c4;
  --compute:#2e8b57; --comm:#d9822b; --overlap:#f0c27b; --copy:#8e6bbf; --idle:#c9ced8; --warn:#b3261e; }
@media (prefers-color-scheme: dark) { :root { --bg:#12161d; --fg:#e4e8ef; --soft:#9aa5b5; --line:#2b3340;
  --card:#1a202a; --accent:#7aa7ff; --idle:#3b4453; --warn:#ff8a80; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--bg); color:var(--fg); font:15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width:1500px; margin:0 auto; padding:16px; }
h1 { font-size:1.5rem; margin:.2em 0; } h2 { font-size:1.2rem; margin:1.6em 0 .5em; }
h3 { font-size:1rem; margin:0 0 .3em; overflow-wrap:anywhere; }
.soft { color:var(--soft); } .file { color:var(--soft); font-size:.8rem; overflow-wrap:anywhere; }
.grid { display:grid; gap:14px; grid-template-columns:repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.card { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:12px 14px; min-width:0; }
.finding { border-left:4px solid var(--accent); } .problem { border-left:4px solid var(--warn); }
.finding p { margin:.2em 0; overflow-wrap:anywhere; }
code { font:0.88em ui-monospace, Consolas, monospace; background:var(--bg); border:1px solid var(--line);
  border-radius:4px; padding:0 4px; overflow-wrap:anywhere; }
.flags code { display:inline-block; margin:2px 4px 2px 0; }
.bar { display:flex; height:22px; border-radius:4px; overflow:hidden; background:var(--idle); margin:8px 0 4px; }
.bar i { display:block; height:100%; }
.legend { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:.85rem; margin:0 0 6px; }
.legend b { font-weight:600; }
.dot { display:inline-block; width:.7em; height:.7em; border-radius:2px; margin-right:5px; }
.scroll { overflow-x:auto; } table { border-collapse:collapse; width:100%; font-size:.85rem; }
th { text-align:left; color:var(--soft); font-weight:600; } td, th { padding:3px 7px 3px 0; vertical-align:top; }
tr + tr td { border-top:1px solid var(--line); } td.n, th.n { text-align:right; white-space:nowrap; }
td.name { overflow-wrap:anywhere; min-width:5.5em; }
td.name:first-child { min-width:8em; }
details > summary { cursor:pointer; color:var(--accent); margin:6px 0; }
.timeline { display:grid; grid-template-columns:auto minmax(0,1fr); gap:2px 8px; margin:8px 0; font-size:.75rem;
  color:var(--soft); }
.timeline svg { width:100%; height:220px; display:block; } .timeline .times { grid-column:2; }
.levels { display:flex; flex-direction:column; justify-content:space-between; text-align:right; white-space:nowrap; }
.times { display:flex; justify-content:space-between; }
pre { margin:4px 0; white-space:pre-wrap; overflow-wrap:anywhere; font-size:.78rem; color:var(--soft); }
"""


def page(title: str, body: str, script: str = "") -> str:
    """A whole HTML document that needs nothing from outside."""
    script = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{_CSS}</style></head><body><main>{body}</main>{script}</body></html>\n"
    )


def text(value: object) -> str:
    """Escaped for HTML."""
    return html.escape(str(value), quote=True)


def table(head: Iterable[tuple[str, bool]], rows: Iterable[Iterable[object]]) -> str:
    """A table; ``head`` holds (title, is a number) for each column.

    Cells are escaped; empty columns are left out.
    """
    columns = list(head)
    cells_of = [list(row) for row in rows]
    # A column that is empty throughout only takes room.
    kept = [i for i, (title, _) in enumerate(columns) if not title or any(str(row[i]) for row in cells_of)]
    columns = [columns[i] for i in kept]
    top = "".join(f'<th class="n">{text(t)}</th>' if number else f"<th>{text(t)}</th>" for t, number in columns)
    lines = []
    for row in cells_of:
        cells = "".join(
            f'<td class="{"n" if number else "name"}">{text(cell)}</td>'
            for cell, (_, number) in zip((row[i] for i in kept), columns, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
