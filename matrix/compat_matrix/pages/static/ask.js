// The form of a report. It reads what is typed or pasted, reduces it to minor releases, and looks the answer up in answers.js,
// which has one for every combination of these.
"use strict";

const FIELDS = { tf: "transformers", pt: "torch", fa: "flash_attention", py: "python" };
const FLASH = /^(?:(?:flash[-_ ]?att(?:n|ention)|fa)(?:[-_ ]?([234]))?(?:[-_]fwd)?(?:[\s=@:v-]+(\d[\w.+]*))?|v?(\d)[\w.+]*)$/;

// A release such as 5.9.1; an error if the text isn't one.
function release(text, names, example) {
  if (/[<>~!*,]/.test(text)) throw `'${text}' is a range: one release, such as ${example}`;
  const short = names === "python" && /^(?:python|py|cp)?\s*3(\d{1,2})$/i.exec(text);
  if (short) return `3.${short[1]}`;
  const found = new RegExp(`^(?:(?:${names}|cpython|pytorch|py|cp)[\\s=:-]*)?v?(\\d+(?:\\.\\d+)*)((?:a|b|rc|\\.post|\\.dev)\\d+)*(?:[+ ].*)?$`, "i").exec(text);
  if (!found) throw `'${text}' isn't a release such as ${example}`;
  return found[1] + (found[2] || "");
}

function flashAttention(text) {
  if (["none", "no", "without", "-"].includes(text)) return "none";
  if (text === "torch") return "torch";
  const found = FLASH.exec(text);
  const kind = found && (found[1] || (found[2] || found[3] || "2")[0]);
  if (!"234".includes(kind || "x")) throw `'${text}' isn't a FlashAttention such as flash-attn 2.8.3, fa4, torch or none`;
  return `fa${kind}`;
}

// The fields in the output of pip freeze or pip list, a requirements.txt, a uv.lock or a poetry.lock.
function pasted(text) {
  const found = {};
  const flash = ["flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4"];
  const locked = [...text.matchAll(/^name\s*=\s*["']([\w.-]+)["']\s*\nversion\s*=\s*["']([^"'\n]+)["']/gm)];
  const listed = /^[ \t]*([A-Za-z0-9][\w.-]*?)[ \t]*(?:\[[^\]\n]*\])?[ \t]*(===?|@|[<>~!]=?|[ \t])[ \t]*([^\s;,\\]+)/gm;
  const every = locked.length ? locked.map((one) => [one[0], one[1], "==", one[2]]) : [...text.matchAll(listed)];
  for (let [line, name, sign, version] of every) {
    name = name.replace(/[-_.]+/g, "-").toLowerCase();
    if (!["transformers", "torch", ...flash].includes(name) || (!sign.trim() && !/^\d/.test(version))) continue;
    if (sign === "@") {
      const wheel = new RegExp(`${name.replace(/-/g, "[-_.]")}-(\\d[^-/]*)(?:-|\\.tar)`).exec(decodeURIComponent(version));
      if (!wheel) throw `${line.trim()} has no version: type it`;
      version = wheel[1];
    } else if ("<>~!".includes(sign[0])) throw `${line.trim()} is a range: type the release that you have`;
    if (found[name] && found[name] !== version) throw `${name} is there as ${found[name]} and ${version}: type the one that you have`;
    found[name] = version;
  }
  if (!found.transformers && !found.torch) throw "neither transformers nor torch is in this text, as in the line torch==2.11.0";
  const own = flash.filter((name) => found[name]).map((name) => `${name} ${found[name]}`);
  if (own.length > 1) throw `${own.join(" and ")} are there: type the one that you use`;
  return { tf: found.transformers || "", pt: found.torch || "", fa: own[0] || "none", py: "" };
}

// The releases as numbers, so that 5.10 comes after 5.9.
const number = (version) => version.split(".").reduce((sum, part, place) => sum + parseInt(part, 10) / 1000 ** place, 0);
const minor = (version) => version.split(".").slice(0, 2).join(".");

// The value of an axis that the report has: the one of the same minor release, or else the nearest.
function nearest(axis, asked) {
  const values = MATRIX.values[axis];
  if (!values.length) return "";
  if (values.includes(asked)) return asked;
  if (axis === "flash_attention") return values[0];
  const wanted = number(minor(asked));
  return [...values].sort((a, b) => Math.abs(number(a) - wanted) - Math.abs(number(b) - wanted) || number(a) - number(b))[0];
}

// The answer: its HTML, how exact it is, and the release and torch of the reader's row and column.
function answer(asked) {
  const have = {};
  const other = [];
  for (const axis of ["transformers", "torch", "flash_attention", "python"]) {
    have[axis] = asked[axis] && nearest(axis, axis === "flash_attention" ? asked[axis] : minor(asked[axis]));
    if (asked[axis] && have[axis] !== (axis === "flash_attention" ? asked[axis] : minor(asked[axis]))) other.push(`${asked[axis]} (${axis.replace("_", " ")})`);
  }
  const html = MATRIX.answers[[have.transformers, have.torch, have.flash_attention, have.python].join("|")] || "";
  const said = other.length ? `${other.join(" and ")} was not tested. This is the answer for the nearest: ` : "";
  return { html, said, have };
}

// How exact an answer is: whether the patch releases that were typed are those of the evidence.
function closeness(asked, tested) {
  const typed = ["transformers", "torch"].filter((axis) => asked[axis]);
  const exact = typed.every((axis) => asked[axis].split(".").length > 2 && asked[axis] === (tested[axis] || "").split("+")[0]);
  return exact ? "patch" : "minor";
}

function read(values) {
  const asked = {};
  const errors = {};
  let typed = values;
  if (values.text.trim()) {
    try {
      const found = pasted(values.text);
      typed = Object.fromEntries(Object.keys(FIELDS).map((name) => [name, values[name].trim() || found[name]]));
    } catch (error) {
      errors.text = String(error);
    }
  }
  const examples = { tf: "5.9.1", pt: "2.11.0+cu130", py: "3.12" };
  for (const [name, axis] of Object.entries(FIELDS)) {
    const text = (typed[name] || "").trim().replace(/^["'`]+|["'`,;]+$/g, "");
    try {
      asked[axis] = !text ? "" : name === "fa" ? flashAttention(text.toLowerCase()) : release(text, axis, examples[name]);
    } catch (error) {
      errors[name] = String(error);
    }
  }
  for (const name of ["tf", "pt"]) {
    const needed = MATRIX.values[FIELDS[name]].length;
    if (needed && !errors[name] && !errors.text && !asked[FIELDS[name]]) errors[name] = `a release such as ${examples[name]}`;
  }
  return { asked, errors, typed };
}

function show(form) {
  const values = Object.fromEntries(["tf", "pt", "fa", "py", "text"].map((name) => [name, form.elements[name].value]));
  const { asked, errors, typed } = read(values);
  for (const name of Object.keys(values)) {
    document.getElementById(`${name}-error`).textContent = errors[name] || "";
    if (errors[name]) form.elements[name].setAttribute("aria-invalid", "true");
    else form.elements[name].removeAttribute("aria-invalid");
  }
  const place = document.getElementById("answer");
  place.replaceChildren();
  if (Object.keys(errors).length) return;
  for (const name of Object.keys(FIELDS)) form.elements[name].value = typed[name];
  const found = answer(asked);
  place.innerHTML = found.html || '<p class="verdict">No result is like it in this report.</p>';
  const close = place.querySelector(".close");
  const row = place.querySelector(".evidence li");
  if (found.html && row && close && close.textContent === MATRIX.closeness.minor) {
    const tested = Object.fromEntries([...row.querySelectorAll("[data-axis]")].map((one) => [one.dataset.axis, one.textContent]));
    close.textContent = MATRIX.closeness[found.said ? "neighbour" : closeness(asked, tested)];
  }
  if (found.said) place.prepend(Object.assign(document.createElement("p"), { textContent: found.said, className: "said" }));
  mine(found.have);
}

// Mark the row and the column of the reader, and put the column first.
function mine(have) {
  for (const table of document.querySelectorAll("table.grid")) {
    const heads = [...table.tHead.rows[0].cells];
    const column = heads.findIndex((head, place) => place && head.dataset.value === have.torch);
    for (const row of table.rows) {
      if (row.cells[0].dataset.value) row.cells[0].classList.toggle("yours", row.cells[0].dataset.value === have.transformers);
      if (column > 0) row.insertBefore(row.cells[column], row.cells[1]);
    }
    for (const head of table.tHead.rows[0].cells) if (head.dataset.value) head.classList.toggle("yours", head.dataset.value === have.torch);
  }
}

if (typeof document !== "undefined") {
  const form = document.getElementById("ask");
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show(form);
  });
}
