// The form of the first page. It reads what is typed or pasted. A service answers at the address with the releases; in a report the
// answer is found among the results in answers.js, as `verdicts.py` finds it in Python.
"use strict";

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
  return { tf: found.transformers || "", pt: found.torch || "", fa: own[0] || "none" };
}

// A version as its release, its suffix, and whether it is a pre-release; null for anything else.
function version(text) {
  const found = /^(\d+(?:\.\d+){0,3})((?:a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(?:[+ ].*)?$/.exec(text);
  if (!found) return null;
  const suffix = found.slice(2).map((one) => one || "").join("");
  return { release: found[1].split(".").map(Number), suffix, early: Boolean(found[2] || found[4]) };
}

const equal = (a, b) => a.suffix === b.suffix && [0, 1, 2, 3].every((place) => (a.release[place] || 0) === (b.release[place] || 0));
const begins = (a, b, most) => a.release.slice(0, most).every((part, place) => place >= b.release.length || part === b.release[place]);

// Whether a cell's value may match a typed one: 5.9 matches 5.9.1, and 5.9.0 matches 5.9.
function related(value, asked) {
  const [there, wanted] = [version(value), version(asked)];
  if (!there || !wanted) return value === asked;
  return Math.min(there.release.length, wanted.release.length) > 2 ? equal(there, wanted) : begins(wanted, there, 2);
}

// Whether a tested version matches a typed one in its components.
function same(asked, tested) {
  const [wanted, there] = [version(asked), version(tested)];
  if (asked === tested || !wanted || !there) return asked === tested;
  if (wanted.release.length > 2 || wanted.suffix) return there.release.length > 2 && equal(wanted, there);
  return wanted.release.length <= there.release.length && begins(wanted, there, 2) && !there.early;
}

// The distance of a tested combination from the question, as numbers that are compared one after the other.
function distance(one, asked, axes) {
  const release = (text) => [0, 1, 2].map((place) => version(text)?.release[place] || 0);
  const minors = [];
  const patches = [];
  for (const axis of axes) {
    const [there, wanted] = [release(one.exact[axis] || ""), release(asked[axis])];
    if (!version(asked[axis])) minors.push(Number(one.exact[axis] !== asked[axis]));
    else minors.push(Math.abs(there[0] - wanted[0]), Math.abs(there[1] - wanted[1]), Number((there[0] - wanted[0] || there[1] - wanted[1]) > 0));
    const differs = version(asked[axis]) && !same(asked[axis], one.exact[axis] || "");
    patches.push(...(differs ? [1, Math.abs(there[2] - wanted[2]), Number(there[2] > wanted[2])] : [0, 0, 0]));
  }
  return [...minors, ...patches, ...release(one.exact.python).map((part) => -part)];
}

// The answer to a question: its verdict, how exact it is, the reason, the evidence, and the nearest combination that works.
function answer(asked) {
  const worst = ["wrong", "failed", "known", "flaky", "passed"];
  const axes = MATRIX.order.filter((axis) => asked[axis]);
  const alike = MATRIX.cells.filter((one) => axes.every((axis) => related(one.cell[axis] || "", asked[axis])));
  const ended = alike.filter((one) => one.exact);
  const fit = ended.filter((one) => axes.every((axis) => same(asked[axis], one.exact[axis] || "")));
  const far = new Map(MATRIX.cells.filter((one) => one.exact).map((one, place) => [one, [...distance(one, asked, axes), place]]));
  const near = (a, b) => {
    const place = far.get(a).findIndex((part, number) => part !== far.get(b)[number]);
    return a === b ? 0 : far.get(a)[place] - far.get(b)[place];
  };
  const last = new Map();
  for (const one of [...(fit.length ? fit : ended)].sort((a, b) => (a.began < b.began ? -1 : Number(a.began > b.began)))) {
    const minor = { ...one.exact, python: one.exact.python.split(".").slice(0, 2).join(".") };
    last.set(JSON.stringify(minor), one);
  }
  const found = [...last.values()].sort((a, b) => worst.indexOf(a.verdict) - worst.indexOf(b.verdict) || near(a, b));
  const refusals = alike.filter((one) => one.verdict === "refused");
  const refused = alike.length > 0 && refusals.length === alike.length;
  const verdict = refused ? "refused" : found.length ? found[0].verdict : "unknown";
  const tested = [...far.keys()].sort(near);
  const patches = ["transformers", "torch"].map((axis) => asked[axis]).filter(Boolean);
  const exact = fit.length && patches.length && patches.every((one) => one.split(".").length > 2);
  const open = alike.find((one) => one.verdict === "unknown");
  return {
    verdict,
    kind: verdict === "failed" ? found[0].kind : null,
    closeness: refused ? "rule" : found.length ? (exact ? "patch" : "minor") : tested.length ? "neighbour" : "none",
    reason: refused ? [...new Set(refusals.map((one) => one.reason))].join("; ") : found.length ? found[0].reason : open ? open.reason : "it was not tested",
    evidence: refused ? [] : found.length ? found.slice(0, 5) : tested.slice(0, 3),
    works: ["passed", "flaky", "known"].includes(verdict) ? null : tested.find((one) => one.verdict === "passed") || null,
  };
}

// What is typed: the value of each axis, and what can't be read, by the name of its field.
function read(values, fields) {
  const asked = {};
  const errors = {};
  let typed = values;
  if (values.text.trim()) {
    try {
      const found = pasted(values.text);
      typed = Object.fromEntries(Object.keys(values).map((name) => [name, values[name].trim() || found[name] || ""]));
    } catch (error) {
      errors.text = String(error);
    }
  }
  for (const [axis, [name, example]] of Object.entries(fields)) {
    const text = typed[name].trim().replace(/^["'`]+|["'`,;]+$/g, "");
    const word = !["tf", "pt", "fa", "py"].includes(name) && /^[a-z][a-z0-9_]*$/i.test(text);
    try {
      asked[axis] = !text ? "" : word ? text.toLowerCase() : name === "fa" ? flashAttention(text.toLowerCase()) : release(text, axis, example);
    } catch (error) {
      errors[name] = String(error);
    }
  }
  return { asked, errors, typed };
}

// An element with a class and its contents.
function made(tag, look, ...inside) {
  const one = Object.assign(document.createElement(tag), { className: look });
  one.append(...inside);
  return one;
}

// The evidence as a list, in which the axes that differ from the question are marked.
function listed(evidence, asked) {
  const list = made("ul", "evidence");
  for (const one of evidence) {
    list.insertAdjacentHTML("beforeend", one.html);
    for (const axis of list.lastElementChild.querySelectorAll("[data-axis]")) {
      const text = asked[axis.dataset.axis];
      axis.classList.toggle("differs", Boolean(text) && !same(text, one.exact[axis.dataset.axis]));
    }
  }
  return list;
}

function show(form) {
  const inputs = [...form.querySelectorAll("[data-axis]")];
  const fields = Object.fromEntries(inputs.map((one) => [one.dataset.axis, [one.id, one.placeholder]]));
  const names = [...inputs.map((one) => one.id), "text"];
  const { asked, errors, typed } = read(Object.fromEntries(names.map((name) => [name, form.elements[name].value])), fields);
  for (const name of names) {
    document.getElementById(`${name}-error`).textContent = errors[name] || "";
    if (errors[name]) form.elements[name].setAttribute("aria-invalid", "true");
    else form.elements[name].removeAttribute("aria-invalid");
  }
  const place = document.getElementById("answer");
  place.replaceChildren();
  if (Object.keys(errors).length || !Object.values(asked).some(Boolean)) return;
  if (typeof MATRIX === "undefined") {
    const given = Object.entries(fields).map(([axis, [name]]) => [name, asked[axis]]).filter(([, text]) => text);
    location.assign(`${form.getAttribute("action")}?${new URLSearchParams(given)}`);
    return;
  }
  for (const name of names) if (name !== "text") form.elements[name].value = typed[name];
  const found = answer(asked);
  const [state, headline] = MATRIX.headlines[found.verdict];
  const sign = made("span", "", MATRIX.signs[state]);
  sign.ariaHidden = "true";
  const said = made("span", `s ${state.replace(" ", "-")}`, sign, ` ${headline}${found.kind ? `: ${found.kind}` : ""}`);
  place.append(made("p", "verdict", said, " ", made("span", "close", MATRIX.closeness[found.closeness])));
  if (found.reason) place.append(made("p", "why", found.reason));
  if (found.evidence.length) place.append(listed(found.evidence, asked));
  if (found.works) place.append(made("p", "", "The nearest combination that works:"), listed([found.works], asked));
  const minor = (text) => text.split(".").slice(0, 2).join(".");
  mine(minor(asked.transformers), minor(asked.torch));
}

// Mark the row and the column of the reader, and put the column first.
function mine(transformers, torch) {
  for (const table of document.querySelectorAll("table.grid")) {
    const heads = [...table.tHead.rows[0].cells];
    const column = heads.findIndex((head, place) => place && head.dataset.value === torch);
    for (const row of table.rows) {
      if (row.cells[0].dataset.value) row.cells[0].classList.toggle("yours", row.cells[0].dataset.value === transformers);
      if (column > 0) row.insertBefore(row.cells[column], row.cells[1]);
    }
    for (const head of table.tHead.rows[0].cells) if (head.dataset.value) head.classList.toggle("yours", head.dataset.value === torch);
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
