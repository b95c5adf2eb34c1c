"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // Sorting: a heading sorts by the values of its column, and a second click turns the order. Blanks stay last.
  function sort(heading) {
    const table = heading.closest("table");
    const column = [...heading.parentNode.children].indexOf(heading);
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const value = (row) => {
      const cell = row.children[column];
      const text = cell.dataset.value ?? "";
      return text === "" ? null : cell.dataset.number === undefined ? text : Number(text);
    };
    const rows = [...body.rows].map((row) => [value(row), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      return down ? -order : order;
    });
    body.append(...rows.map(([, row]) => row));
  }
  for (const button of all("th button")) button.addEventListener("click", () => sort(button.parentNode));

  // Filters: rows that have a facet must match it; marks of charts that do not are dimmed.
  const search = document.getElementById("search");
  const selects = all(".tools select[data-facet]");
  const count = document.getElementById("count");
  function matches(element) {
    return selects.every((select) => {
      const own = element.dataset[select.dataset.facet];
      return !select.value || own === undefined || own === select.value;
    });
  }
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, total = 0;
    for (const box of all(".scroll")) {
      let here = 0;
      for (const row of all("tbody tr", box)) {
        const text = row.textContent.toLowerCase();
        const fits = matches(row) && words.every((word) => text.includes(word));
        row.hidden = !fits;
        row.style.display = fits ? "" : "none";
        here += fits;
        total += 1;
      }
      shown += here;
      box.classList.toggle("none", here === 0);
    }
    for (const mark of all(".mark")) mark.classList.toggle("dim", !matches(mark));
    count.textContent = shown === total ? `${total} rows` : `${shown} of ${total} rows`;
  }
  search.addEventListener("input", filter);
  for (const select of selects) select.addEventListener("change", filter);
  document.getElementById("reset").addEventListener("click", () => {
    search.value = "";
    for (const select of selects) select.value = "";
    filter();
  });
  filter();

  // Light and dark: as the system says, until the reader chooses.
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
