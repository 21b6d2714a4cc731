"""The style sheet and the script of a page."""

# Colors are variables, so that one set of rules serves light and dark displays and paper.
CSS = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1a1d21; --muted: #5c636d; --line: #e2e5ea;
  --grid: #eceef2; --accent: #1f6feb; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; --warn-bg: #fff8e1;
  --c1: #1f6feb; --c2: #d9480f; --c3: #1a8a5a; --c4: #9c36b5; --c5: #b08000; --c6: #0b7285; --c7: #c2255c; --c8:
  #66707c;
  --heat: 31, 111, 235; --miss: 217, 72, 15; --on-heat: #fff }
@media (prefers-color-scheme: dark) { :root { --bg: #0e1116; --card: #161a21; --ink: #e8eaed; --muted: #9aa3ae;
  --line: #2a303a; --grid: #222832; --accent: #6cb0ff; --good: #4cc36b; --bad: #ff7b72; --warn: #e3b341;
  --warn-bg: #2a2410; --c1: #6cb0ff; --c2: #ff9a5c; --c3: #53c794; --c4: #d59bf0; --c5: #e3b341; --c6: #4fc3d6;
  --c7: #f783ac; --c8: #9aa3ae; --heat: 88, 166, 255; --miss: 255, 140, 80; --on-heat: #0e1116 } }
@media print { :root { --bg: #fff; --card: #fff; --ink: #000; --muted: #444; --line: #bbb; --grid: #ddd } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; scroll-padding-top: 3.2rem }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto,
  "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 20px }
header { padding-top: 28px; padding-bottom: 12px }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em }
h2 { font-size: 1.15rem; margin: 0 0 10px } h3 { font-size: .95rem; margin: 22px 0 8px }
section > figure + figure, .charts + figure, figure + .charts { margin-top: 18px }
p { margin: 0 0 10px; max-width: 74ch } a { color: var(--accent) } code { font: .88em ui-monospace, Menlo, monospace }
.sub, .note, footer, figcaption { color: var(--muted) } .note, figcaption { font-size: .87rem }
nav { position: sticky; top: 0; z-index: 2; background: var(--bg); border-bottom: 1px solid var(--line) }
nav div { max-width: 1120px; margin: 0 auto; padding: 8px 20px; display: flex; gap: 18px; overflow-x: auto }
nav a { white-space: nowrap; text-decoration: none; font-size: .9rem; color: var(--muted) }
nav a:hover, nav a:focus { color: var(--accent) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin:
  16px 0 }
footer { padding-top: 4px; padding-bottom: 36px; font-size: .85rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 16px; margin: 0 0 14px }
.tiles div span { display: block } .tiles .label, .tiles .detail { color: var(--muted); font-size: .85rem }
.tiles .value { font-size: 1.55rem; font-weight: 600; line-height: 1.25; letter-spacing: -.01em }
.charts { display: grid; align-items: end; gap: 18px 26px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)) }
.charts.narrow { grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)) }
figure { margin: 0; min-width: 0 } figure > svg { display: block; width: 100%; height: auto }
.charts.top { align-items: start } figcaption b { color: var(--ink); font-weight: 600 }
svg text { font: 11px system-ui, sans-serif; fill: var(--muted) } svg .strong { fill: var(--ink) }
svg .grid { stroke: var(--grid) } svg .axis { stroke: var(--line) } svg .mark { stroke-dasharray: 3 3; stroke:
  var(--muted) }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: .84rem; color: var(--muted); margin: 2px 0 4px }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px }
.scroll { overflow: auto; max-height: 70vh; border: 1px solid var(--line); border-radius: 8px; margin: 0 0 10px }
table { border-collapse: collapse; width: 100%; font-size: .89rem }
th, td { padding: 5px 10px; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top }
tr:last-child td { border-bottom: 0 } th { font-weight: 600; position: sticky; top: 0; background: var(--card);
  box-shadow: inset 0 -1px var(--line); white-space: nowrap; z-index: 1 }
td.num, th.num { text-align: right; white-space: nowrap } td.text { min-width: 7em }
th button { all: unset; cursor: pointer } th button:hover, th button:focus-visible { color: var(--accent) }
th button::after { content: "\\2195"; color: var(--muted); opacity: .45; margin-left: 4px; font-size: .85em }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1 }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1 }
td .bar { display: inline-block; height: 7px; border-radius: 2px; background: var(--accent); opacity: .75;
  margin-right: 7px; vertical-align: 1px }
input[type=search] { font: inherit; font-size: .9rem; color: inherit; background: var(--bg); border: 1px solid
  var(--line);
  border-radius: 6px; padding: 4px 10px; margin: 0 0 8px; width: min(100%, 260px) }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 16px; margin: 0 0 10px }
.card { border: 1px solid var(--line); border-radius: 8px; overflow: hidden; font-size: .84rem; break-inside: avoid }
.card .images { display: flex; background: var(--grid) } .card img { flex: 1; min-width: 0; width: 50%;
  aspect-ratio: 1;
  object-fit: cover } .card img.tiny { image-rendering: pixelated } .card .text { padding: 7px 10px 9px }
.card .title { font-weight: 600 } .card .file { color: var(--muted); font-size: .92em }
.good { color: var(--good) } .bad { color: var(--bad) }
.notice { background: var(--warn-bg); border-left: 3px solid var(--warn); border-radius: 4px; padding: 8px 12px;
  margin: 0 0 12px; font-size: .92rem; max-width: none }
details { margin: 10px 0 0 } summary { cursor: pointer; font-weight: 600; font-size: .92rem } details > * + * {
  margin-top: 8px }
pre { font: .84rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; margin: 0; background:
  var(--bg);
  border-radius: 6px; padding: 10px 12px } dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px
  16px; margin: 0;
  font-size: .9rem } dt { color: var(--muted) } dd { margin: 0 }
@media (max-width: 560px) { header, main, footer { padding-left: 12px; padding-right: 12px } nav div { padding: 8px
  12px }
  section { padding: 14px 12px; border-radius: 8px } h1 { font-size: 1.35rem } .tiles { grid-template-columns: 1fr
  1fr }
  .tiles .value { font-size: 1.3rem } .gallery { grid-template-columns: 1fr 1fr; gap: 10px } th, td { padding: 5px
  7px }
  dl { grid-template-columns: 1fr } dd { margin-bottom: 5px } .card .text { padding: 6px 8px } }
@media print { nav, input[type=search] { display: none } body { font-size: 11px } section { border: 0; padding: 8px
  0 }
  .scroll { max-height: none; overflow: visible; border: 0 } th { position: static } figure, tr { break-inside:
  avoid }
  .gallery { grid-template-columns: repeat(4, 1fr) } h2, h3 { break-after: avoid } }
"""

# Sorts a table by a column, filters its rows, and opens everything before the page is printed.
JS = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, at) => row.cells[at].dataset.v ?? row.cells[at].textContent;
  heads.forEach((head, at) => head.querySelector("button").addEventListener("click", () => {
    const isNumber = head.classList.contains("num"), now = head.getAttribute("aria-sort");
    const down = now ? now === "ascending" : isNumber;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => isNumber ? a - b : a.localeCompare(b, undefined, {numeric: true});
    const rows = [...body.rows].map(row => [value(row, at), row]);
    const isMissing = cell => isNumber && cell === "";
    rows.sort(([a], [b]) => isMissing(a) - isMissing(b) || (down ? order(b, a) : order(a, b)));
    body.append(...rows.map(([, row]) => row));
  }));
  const filter = table.parentElement.previousElementSibling;
  if (filter?.type === "search") filter.addEventListener("input", () => {
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase());
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(item => item.open = true));
"""
