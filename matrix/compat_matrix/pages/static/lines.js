// In a report, lines that several pages repeat are in LINES; a page has where they are: `2 0 -3+4` are the
// third, the fourth, and five from the second on.
for (const place of document.querySelectorAll("template[data-lines]")) {
  let next = 0;
  const ranges = place.dataset.lines.split(" ").map((range) => {
    const [ahead, more = 0] = range.split("+").map(Number);
    const first = next + ahead;
    next = first + more + 1;
    return LINES.slice(first, next).join("");
  });
  place.outerHTML = ranges.join("");
}
