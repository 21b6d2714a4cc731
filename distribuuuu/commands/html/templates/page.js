// Sorts a table by a column, filters its rows, and opens the galleries before the page is printed.
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
