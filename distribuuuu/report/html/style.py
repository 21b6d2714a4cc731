"""The style sheet and the script of a page."""

# Colors are variables, so that one set of rules serves light and dark displays. Paper is light, and has blocks instead
# of grids, because only there a heading stays on the page of what follows.
CSS = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1a1d21; --muted: #5c636d; --line: #e2e5ea;
  --grid: #eceef2; --accent: #1f6feb; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; --warn-bg: #fff8e1;
  --c1: #1f6feb; --c2: #d9480f; --c3: #1a8a5a; --c4: #9c36b5; --c5: #b08000; --c6: #0b7285; --c7: #c2255c;
  --c8: #66707c; --heat: 31, 111, 235; --miss: 217, 72, 15; --on-heat: #fff }
@media screen and (prefers-color-scheme: dark) { :root { --bg: #0e1116; --card: #161a21; --ink: #e8eaed;
  --muted: #9aa3ae; --line: #2a303a; --grid: #222832; --accent: #6cb0ff; --good: #4cc36b; --bad: #ff7b72;
  --warn: #e3b341; --warn-bg: #2a2410; --c1: #6cb0ff; --c2: #ff9a5c; --c3: #53c794; --c4: #d59bf0; --c5: #e3b341;
  --c6: #4fc3d6; --c7: #f783ac; --c8: #9aa3ae; --heat: 88, 166, 255; --miss: 255, 140, 80; --on-heat: #0e1116 } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; scroll-padding-top: 3.2rem }
body { margin: 0; background: var(--bg); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums }
header, main, footer, nav div { max-width: 1120px; margin: 0 auto; padding: 0 20px }
header { padding-top: 28px; padding-bottom: 12px }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em }
h2 { font-size: 1.2rem; margin: 0 0 12px; letter-spacing: -.005em }
h3 { font-size: .95rem; margin: 22px 0 8px }
section > figure + figure, .charts + figure, figure + .charts { margin-top: 18px }
p { margin: 0 0 10px; max-width: 74ch }
p.lead { font-size: 1.1rem; font-weight: 600; line-height: 1.4; max-width: none; margin-bottom: 16px }
a { color: var(--accent) }
.sub, .note, footer, figcaption { color: var(--muted) }
.note, figcaption { font-size: .87rem }
nav { position: sticky; top: 0; z-index: 3; background: var(--bg); border-bottom: 1px solid var(--line) }
nav div { padding-top: 8px; padding-bottom: 8px; display: flex; gap: 18px; overflow-x: auto; scrollbar-width: none }
nav a { white-space: nowrap; text-decoration: none; font-size: .9rem; color: var(--muted) }
nav a:hover, nav a:focus { color: var(--accent) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px;
  margin: 16px 0 }
footer { padding-top: 4px; padding-bottom: 36px; font-size: .85rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 14px 20px; margin: 0 0 20px }
.tiles div span { display: block }
.tiles .label, .tiles .detail { color: var(--muted); font-size: .85rem; line-height: 1.4 }
.tiles .value { font-size: 1.55rem; font-weight: 600; line-height: 1.3; letter-spacing: -.01em }
.charts { display: grid; gap: 20px 26px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)) }
.charts.narrow { grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)) }
.charts > figure { display: flex; flex-direction: column }
.charts:not(.top) > figure > svg { margin-top: auto }
figure { margin: 0; min-width: 0; overflow-x: auto }
figure > svg { display: block; width: 100%; height: auto }
figcaption b { color: var(--ink); font-weight: 600 }
svg text { font: 11px system-ui, sans-serif; fill: var(--muted) }
svg .strong { fill: var(--ink) }
svg .grid { stroke: var(--grid) }
svg .axis { stroke: var(--line) }
svg .mark { stroke-dasharray: 3 3; stroke: var(--muted) }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: .84rem; color: var(--muted); margin: 2px 0 4px }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px }
.scroll { overflow: auto; max-height: 70vh; border: 1px solid var(--line); border-radius: 8px; margin: 0 0 10px }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .89rem }
th, td { padding: 5px 10px; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top }
tr:last-child td { border-bottom: 0 }
tbody tr:hover td { background: var(--bg) }
th { font-weight: 600; position: sticky; top: 0; background: var(--card); white-space: nowrap; z-index: 1;
  border-bottom-color: var(--line) }
td.num, th.num { text-align: right; white-space: nowrap }
td.text { overflow-wrap: break-word; min-width: 5em; max-width: 32em }
th button { all: unset; cursor: pointer }
th button:hover, th button:focus-visible { color: var(--accent) }
th button::after { content: "\\2195"; color: var(--muted); opacity: .45; margin-left: 4px; font-size: .85em }
th[aria-sort=ascending] button::after { content: "\\2191"; opacity: 1 }
th[aria-sort=descending] button::after { content: "\\2193"; opacity: 1 }
td .bar { display: inline-block; width: 64px; height: 7px; border-radius: 2px; margin-right: 10px; vertical-align: 1px;
  background: linear-gradient(var(--accent), var(--accent)) no-repeat var(--grid) }
input[type=search] { font: inherit; font-size: .9rem; color: inherit; background: var(--bg); padding: 4px 10px;
  border: 1px solid var(--line); border-radius: 6px; margin: 0 0 8px; width: min(100%, 260px) }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 16px; margin: 0 0 10px }
.gallery.small { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 14px }
.card { border: 1px solid var(--line); border-radius: 8px; overflow: hidden; font-size: .84rem; line-height: 1.45;
  break-inside: avoid }
.card .images { display: flex; background: var(--grid) }
.card img { flex: 1; min-width: 0; width: 50%; aspect-ratio: 1; object-fit: cover }
.card img.tiny { image-rendering: pixelated }
.card .text { padding: 7px 10px 9px }
.card .title { font-weight: 600 }
.card .file { color: var(--muted); font-size: .92em }
.good { color: var(--good) }
.bad { color: var(--bad) }
.notice { background: var(--warn-bg); border-left: 3px solid var(--warn); border-radius: 4px; padding: 8px 12px;
  margin: 0 0 12px; font-size: .92rem; max-width: none }
details { margin: 10px 0 0 }
summary { cursor: pointer; font-weight: 600; font-size: .92rem }
details > * + * { margin-top: 8px }
pre { font: .84rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; margin: 0; padding: 10px 12px;
  background: var(--bg); border-radius: 6px }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 0; font-size: .9rem }
dt { color: var(--muted) }
dd { margin: 0 }
@media screen and (max-width: 560px) {
  header, main, footer, nav div { padding-left: 12px; padding-right: 12px }
  section { padding: 14px 12px; border-radius: 8px }
  h1 { font-size: 1.35rem }
  .tiles { grid-template-columns: 1fr 1fr }
  .tiles .value { font-size: 1.3rem }
  .gallery, .gallery.small { grid-template-columns: 1fr 1fr; gap: 10px }
  .card .text { padding: 6px 8px }
  table { font-size: .76rem }
  th, td { padding: 5px 3px }
  th, th.num { white-space: normal; overflow-wrap: normal }
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--card); z-index: 1;
    min-width: 5em; max-width: 8em }
  th:first-child { z-index: 2 }
  th:not([aria-sort]) button::after, td .bar { display: none }
  dl { grid-template-columns: 1fr }
  dd { margin-bottom: 5px } }
@media print {
  :root { --bg: #fff; --card: #fff; --ink: #000; --muted: #444; --line: #bbb; --grid: #e4e4e4; color-scheme: light }
  @page { margin: 14mm 12mm }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  nav, input[type=search], th button::after { display: none }
  html { font-size: 11px }
  body { font-size: 1rem }
  header { padding-top: 0 }
  header, main, footer { padding-left: 0; padding-right: 0; max-width: none }
  section { border: 0; padding: 6px 0; margin: 6px 0 }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(95px, 1fr)) }
  .tiles .value { font-size: 1.3rem }
  .charts, .gallery { display: block; orphans: 1; widows: 1 }
  .charts > figure, .gallery > .card { display: inline-block; vertical-align: top; margin: 0 1% 12px 0; width: 48% }
  .charts.narrow > figure { width: 32% }
  .gallery > .card { width: 23.5% }
  .gallery.small > .card { width: 15.2% }
  figure > svg { min-width: 0 !important }
  .scroll { max-height: none; overflow: visible; border: 0 }
  th { position: static }
  th, td { padding: 2px 8px }
  figure, tr, p { break-inside: avoid }
  .card { font-size: .9em }
  h2, h3, p { break-after: avoid } }
"""

# Sorts a table by a column, filters its rows, and opens the galleries before the page is printed.
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
addEventListener("beforeprint", () => {
  for (const item of document.querySelectorAll("details:has(.gallery)")) item.open = true;
});
"""
