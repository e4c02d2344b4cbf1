// Arrow keys, Home and End move from cell to cell of a grid; a click on a command selects it.
"use strict";

document.addEventListener("keydown", (event) => {
  const cell = event.target.closest?.(".grid td");
  if (!cell || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  const row = cell.parentElement;
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] }[event.key];
  if (!step) return;
  const [down, across] = step;
  const links = (line) => [...line.cells].map((one) => one.querySelector("a"));
  let target = null;
  if (down) {
    for (let line = row; !target && line; ) {
      line = down < 0 ? line.previousElementSibling : line.nextElementSibling;
      target = line && links(line)[cell.cellIndex];
    }
  } else {
    const all = links(row);
    const order = across < 0 ? all.slice(0, cell.cellIndex).reverse() : all.slice(cell.cellIndex + 1);
    const there = order.filter(Boolean);
    target = Number.isFinite(across) ? there[0] : there.at(-1);
  }
  if (target) {
    target.focus();
    event.preventDefault();
  }
});

document.addEventListener("click", (event) => {
  const command = event.target.closest?.("code.copy");
  if (command && getSelection().isCollapsed) getSelection().selectAllChildren(command);
});
