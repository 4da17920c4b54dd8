// Sorts a table by the column whose heading is clicked, or reached with Tab and pressed Enter on; again: the other way.
"use strict";
const UNITS = { k: 1e3, M: 1e6, G: 1e9, min: 60, h: 3600 };
function valueOf(row, column) {
  const text = row.cells[column].innerText.replace(/[\u2212]/g, "-").trim();
  const found = text.match(/^[+-]?[\d,]*\.?\d+/);
  if (!found) return text;
  let value = 0;
  for (const [, number, unit] of text.split("\u00b1")[0].matchAll(/([+-]?[\d,]*\.?\d+)\s*(k|M(?!B)|G|min|h)?/g)) {
    value += Number(number.replaceAll(",", "")) * (UNITS[unit] || 1);
    if (!(unit === "min" || unit === "h")) break;
  }
  return value;
}
function compare(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
  return typeof a === "number" ? -1 : 1;
}
function sort(heading) {
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const table = heading.closest("table");
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  for (const body of table.tBodies) {
    const rows = [...body.rows].filter((row) => !row.classList.contains("part"));
    const values = new Map(rows.map((row) => [row, valueOf(row, heading.cellIndex)]));
    rows.sort((a, b) => sign * compare(values.get(a), values.get(b)));
    body.append(...rows);
  }
}
for (const heading of document.querySelectorAll("table.sortable thead th")) {
  heading.tabIndex = 0;
  heading.addEventListener("click", () => sort(heading));
  heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(heading); });
}
