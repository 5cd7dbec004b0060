"use strict";
document.documentElement.classList.add("js");

// Sorting: a click on a column's title; numbers by value, others as text, unknown ones last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        return "n" in cell.dataset ? Number(cell.dataset.n) : cell.textContent;
      };
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        const unknown = (v) => v === "–";
        if (unknown(x) || unknown(y)) return unknown(x) - unknown(y);
        const by = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
        return down ? -by : by;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}

// Timelines: the part of the step that is shown is [from, from + width), as shares of the whole.
for (const figure of document.querySelectorAll(".timeline")) {
  const lanes = [...figure.querySelectorAll("svg")];
  const ticks = figure.querySelector(".ticks");
  const said = figure.querySelector(".said");
  const { end, scale, unit } = figure.dataset;
  const whole = Number(end) * Number(scale);
  let from = 0;
  let width = 1;
  figure.querySelector(".tools").hidden = false;

  const step = (range) => {
    const rough = 10 ** Math.floor(Math.log10(range / 4));
    return [1, 2, 5, 10].map((n) => n * rough).find((n) => range / n <= 6);
  };
  const show = () => {
    for (const lane of lanes) {
      const height = lane.viewBox.baseVal.height;
      lane.setAttribute("viewBox", `${from * 1000} 0 ${width * 1000} ${height}`);
    }
    const each = step(width * whole);
    const marks = [];
    for (let n = Math.ceil((from * whole) / each - 1e-9); n * each <= (from + width) * whole * 1.0001; n++) {
      const mark = document.createElement("span");
      mark.textContent = `${Number((n * each).toPrecision(6))} ${unit}`;
      mark.style.left = `${((n * each) / whole - from) / width * 100}%`;
      mark.classList.toggle("last", parseFloat(mark.style.left) > 93);
      marks.push(mark);
    }
    ticks.replaceChildren(...marks);
  };
  const zoom = (factor, at = 0.5) => {
    const middle = from + at * width;
    width = factor ? Math.min(1, Math.max(1e-4, width / factor)) : 1;
    from = Math.min(1 - width, Math.max(0, middle - at * width));
    show();
  };
  const move = (share) => {
    from = Math.min(1 - width, Math.max(0, from + share * width));
    show();
  };
  for (const button of figure.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
  for (const lane of lanes) {
    lane.tabIndex = 0;
    lane.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = lane.getBoundingClientRect();
      zoom(event.deltaY < 0 ? 1.3 : 1 / 1.3, (event.clientX - box.left) / box.width);
    }, { passive: false });
    lane.addEventListener("keydown", (event) => {
      const done = { "+": () => zoom(2), "-": () => zoom(0.5), 0: () => zoom(0), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) }[event.key];
      if (done) { event.preventDefault(); done(); }
    });
    let last = null;
    lane.addEventListener("pointerdown", (event) => { last = event.clientX; });
    lane.addEventListener("pointermove", (event) => {
      if (last === null || !event.buttons) return;
      move((last - event.clientX) / lane.getBoundingClientRect().width);
      last = event.clientX;
    });
    lane.addEventListener("pointerup", () => { last = null; });
    lane.addEventListener("click", (event) => {
      const title = event.target.querySelector("title");
      if (!title) return;
      for (const other of figure.querySelectorAll(".picked")) other.classList.remove("picked");
      event.target.classList.add("picked");
      said.textContent = title.textContent;
      said.hidden = false;
    });
  }
  show();
}
