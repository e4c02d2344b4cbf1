// Draws the tables of figures with uPlot: a line for each column, the commits on the axis. Dragging or a button zooms, a double click
// shows all again.
"use strict";

// Noise in the last digits isn't as high as the plot.
function padded(low, high) {
  const more = Math.max((high - low) / 10, Math.abs(high) / 50) || 1;
  return [low - more, high + more];
}

function short(value) {
  const rounded = Number((value ?? NaN).toPrecision(4));
  return Number.isNaN(rounded) ? "" : rounded && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

function drawn(section) {
  const table = section.querySelector("details table");
  const rows = [...table.tBodies[0].rows].reverse();
  const commits = rows.map((row) => row.cells[0].dataset.label.split("|").filter(Boolean));
  const values = (column) => rows.map((row) => (row.cells[column].dataset.value ? Number(row.cells[column].dataset.value) : null));
  const style = getComputedStyle(section);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const colours = colour("lines").split(" ");
  const names = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  const lines = names.slice(1).map((label, place) => ({
    label,
    stroke: colours[place % colours.length],
    dash: place < colours.length ? [] : [6, 4],
    width: 1.5,
    points: { show: true, size: 5 },
    spanGaps: true,
    value: (_, value) => short(value),
  }));
  const axis = { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
  const size = () => ({ width: section.clientWidth, height: 220 });
  const place = document.createElement("div");
  place.ariaHidden = "true"; // the table has the same
  section.querySelector("details").before(place);
  const plot = new uPlot(
    {
      ...size(),
      cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, low, high) => [low - 0.3, high + 0.3] }, y: { range: (_, low, high) => padded(low ?? 0, high ?? 1) } },
      series: [{ label: names[0], value: (_, at) => (commits[at] || []).join(" ") }, ...lines],
      axes: [
        { ...axis, size: 46, space: 76, incrs: [1, 2, 5, 10, 20, 50], values: (_, ticks) => ticks.map((at) => (commits[at] || []).join("\n")) },
        { ...axis, size: 64, values: (_, ticks) => ticks.map(short) },
      ],
    },
    [rows.map((_, at) => at), ...lines.map((_, place) => values(place + 1))],
    place,
  );
  const sized = new ResizeObserver(() => plot.setSize(size()));
  sized.observe(section);
  return { plot, end: () => (sized.disconnect(), plot.destroy(), place.remove()) };
}

// Buttons that show the last results alone: a keyboard and a finger can't drag.
function zoomed(section, current) {
  const count = section.querySelector("details tbody").rows.length;
  const choices = [10, 30].filter((last) => last < count);
  if (!choices.length) return;
  const buttons = document.createElement("p");
  buttons.className = "zoom";
  for (const last of [...choices, count]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = last === count ? `all ${count}` : `the last ${last}`;
    button.addEventListener("click", () => current().setScale("x", { min: count - last, max: count - 1 }));
    buttons.append(button);
  }
  section.querySelector("details").before(buttons);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
for (const section of document.querySelectorAll(".plot")) {
  let shown = drawn(section);
  section.querySelector("details").open = false;
  zoomed(section, () => shown.plot);
  dark.addEventListener("change", () => {
    shown.end();
    shown = drawn(section);
  });
}
