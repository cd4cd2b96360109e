"use strict";
// Sorts a table by the column whose heading was pressed; numbers by value, words by alphabet.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
    const column = [...head.parentElement.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      const [u, v] = [parseFloat(x), parseFloat(y)];
      if (Number.isNaN(u) !== Number.isNaN(v)) return Number.isNaN(u) ? 1 : -1;
      return (up ? 1 : -1) * (Number.isNaN(u) ? x.localeCompare(y) : u - v);
    };
    body.append(...[...body.rows].sort(order));
  });
}
