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
  return { transformers: found.transformers || "", torch: found.torch || "", "flash-attn": own[0] || "none" };
}

// A version as its release, its suffix, and whether it is a pre-release; null for anything else.
function version(text) {
  if (!versions.has(text)) versions.set(text, parsed(text));
  return versions.get(text);
}
const versions = new Map();
function parsed(text) {
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

// Major, minor and micro; zeros for what isn't a version.
const numbers = (text) => [0, 1, 2].map((place) => version(text || "")?.release[place] || 0);

// The distance of a tested combination from the question, as numbers that are compared one after the other.
function distance(one, asked, axes) {
  const minors = [];
  const patches = [];
  for (const axis of axes) {
    const [there, wanted] = [numbers(one.exact[axis]), numbers(asked[axis])];
    if (!version(asked[axis])) minors.push(Number(one.exact[axis] !== asked[axis]));
    else minors.push(Math.abs(there[0] - wanted[0]), Math.abs(there[1] - wanted[1]), Number((there[0] - wanted[0] || there[1] - wanted[1]) > 0));
    const differs = version(asked[axis]) && !same(asked[axis], one.exact[axis] || "");
    patches.push(...(differs ? [1, Math.abs(there[2] - wanted[2]), Number(there[2] > wanted[2])] : [0, 0, 0]));
  }
  return [...minors, ...patches, ...numbers(one.exact.python).map((part) => -part)];
}

// Whether a condition holds, as `expressions.py` has it; null if that depends on an axis whose value is null.
function holds([sign, ...parts], values) {
  if (sign === "and" || sign === "or") {
    const said = parts.map((part) => holds(part, values));
    if (said.includes(sign === "or")) return sign === "or";
    return said.includes(null) ? null : sign === "and";
  }
  if (sign === "not") {
    const inner = holds(parts[0], values);
    return inner === null ? null : !inner;
  }
  const [axis, theirs] = parts;
  const mine = axis in values ? values[axis] : "";
  if (mine === null) return null;
  if (sign === "has") return mine !== "";
  if (typeof theirs === "string") return (mine === theirs) === (sign === "==");
  if (!/^\d/.test(mine)) return sign === "!=";
  const own = mine.split(".").map(Number);
  const place = theirs.findIndex((part, number) => part !== (own[number] || 0));
  const order = place < 0 ? 0 : (own[place] || 0) - theirs[place];
  return { "==": order === 0, "!=": order !== 0, "<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0 }[sign];
}

// For each device and FlashAttention that may be meant: the device, and the rules that exclude the combination.
function refusing(asked) {
  const fixed = Object.fromEntries(Object.keys(MATRIX.values).map((axis) => [axis, null]));
  for (const [axis, value] of Object.entries(asked)) if (value) fixed[axis] = version(value)?.release.join(".") || value;
  let meant = [fixed];
  for (const [axis, words] of Object.entries(MATRIX.words)) {
    if (!asked[axis]) meant = meant.flatMap((one) => words.map((word) => ({ ...one, [axis]: word })));
  }
  return meant.map((one) => ({ device: one.device, rules: MATRIX.rules.filter((rule) => holds(rule.clause, one)) }));
}

// The reasons of the rules that exclude all of some combinations, or else of the first for each; none if one of them isn't excluded.
function deciding(refusing) {
  if (!refusing.every((one) => one.rules.length)) return "";
  const common = refusing[0].rules.filter((rule) => refusing.every((one) => one.rules.includes(rule)));
  const some = common.length ? common : refusing.map((one) => one.rules[0]);
  return [...new Set(some.map((rule) => rule.because))].join("; ");
}

// Why nothing of a combination was run.
function neverRun(asked, alike, axes) {
  if (alike.length) return alike[0].reason;
  const none = axes.filter((axis) => !(MATRIX.values[axis] || []).some((value) => related(value, asked[axis])));
  if (!none.length || !Object.keys(MATRIX.values).length) return "no run has planned it";
  return `the matrix has no ${none.map((axis) => `${axis.replace("flash_attention", "flash-attn")} ${asked[axis]}`).join(" and no ")}`;
}

// The answer to a question: its verdict, how exact it is, the reason, the verdict on each device, the evidence, failures next to it, and
// the nearest combination that works.
function answer(asked) {
  const worst = ["wrong", "failed", "known", "flaky", "passed"];
  const axes = MATRIX.order.filter((axis) => asked[axis]);
  const differ = (one) => axes.filter((axis) => !related(one.cell[axis] || "", asked[axis]));
  const fits = (one) => axes.every((axis) => same(asked[axis], one.exact[axis] || ""));
  const alike = MATRIX.cells.filter((one) => !differ(one).length);
  const ended = alike.filter((one) => one.exact);
  const newest = ended.filter(fits);
  const fit = newest.length || !ended.length ? newest : MATRIX.earlier.filter((one) => !differ(one).length && fits(one));
  const meant = refusing(asked);
  const refused = fit.length ? "" : deciding(meant);
  const far = new Map([MATRIX.cells, MATRIX.earlier].flatMap((some) => some.map((one, place) => [one, one.exact && [...distance(one, asked, axes), place]])));
  const near = (a, b) => {
    const place = far.get(a).findIndex((part, number) => part !== far.get(b)[number]);
    return place < 0 ? 0 : far.get(a)[place] - far.get(b)[place];
  };
  const last = new Map();
  for (const one of (fit.length ? [...fit] : refused ? [] : ended).sort((a, b) => (a.began < b.began ? -1 : Number(a.began > b.began)))) {
    const minor = { ...one.exact, python: one.exact.python.split(".").slice(0, 2).join(".") };
    last.set(JSON.stringify(minor), one);
  }
  const found = [...last.values()].sort((a, b) => worst.indexOf(a.verdict) - worst.indexOf(b.verdict) || near(a, b));
  const verdict = found.length ? found[0].verdict : refused ? "refused" : "unknown";
  const fine = found.filter((one) => ["passed", "flaky", "known"].includes(one.verdict)).length;
  const works = ["passed", "flaky", "known"].includes(verdict);
  const tested = works ? [] : MATRIX.cells.filter((one) => one.exact).sort(near);
  const patches = ["transformers", "torch"].map((axis) => asked[axis]).filter(Boolean);
  const exact = fit.length && patches.length && patches.every((one) => one.split(".").length > 2);
  const sides = new Map();
  for (const one of verdict === "unknown" ? tested : []) {
    const [axis, ...others] = differ(one);
    const [there, here] = [numbers(one.cell[axis]), numbers(asked[axis])];
    const side = `${axis} ${(there[0] - here[0] || there[1] - here[1] || there[2] - here[2]) > 0}`;
    if (!others.length && !sides.has(side)) sides.set(side, one);
  }
  const on = (device) => {
    const own = found.find((one) => one.cell.device === device);
    const rules = deciding(meant.filter((one) => one.device === device));
    return { device, verdict: own ? own.verdict : rules ? "refused" : "unknown", reason: own ? own.reason : rules };
  };
  const devices = MATRIX.words.device.filter((device) => (MATRIX.values.device || []).includes(device) || found.some((one) => one.cell.device === device));
  return {
    verdict,
    kind: verdict === "failed" ? found[0].kind : null,
    mixed: fine && fine < found.length ? `${fine} of ${found.length} tested combinations work` : "",
    closeness: refused ? "rule" : found.length ? (exact ? "patch" : "minor") : tested.length ? "neighbour" : "none",
    reason: found.length ? found[0].reason : refused || neverRun(asked, alike, axes),
    devices: (asked.device ? [asked.device] : devices).map(on),
    evidence: refused ? [] : found.length ? found.slice(0, 5) : tested.slice(0, 3),
    against: [...sides.values()].filter((one) => worst.indexOf(one.verdict) < 3),
    works: tested.find((one) => one.verdict === "passed") || null,
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
      // A GPU's environment without a package has torch's own FlashAttention.
      if (values.device === "cuda" && found["flash-attn"] === "none") found["flash-attn"] = "torch";
      typed = Object.fromEntries(Object.keys(values).map((name) => [name, values[name].trim() || found[name] || ""]));
    } catch (error) {
      errors.text = String(error);
    }
  }
  for (const [axis, [name, example]] of Object.entries(fields)) {
    const text = typed[name].trim().replace(/^["'`]+|["'`,;]+$/g, "");
    const word = !["transformers", "torch", "flash-attn", "python"].includes(name) && /^[a-z][a-z0-9_]*$/i.test(text);
    try {
      asked[axis] = !text ? "" : word ? text.toLowerCase() : name === "flash-attn" ? flashAttention(text.toLowerCase()) : release(text, axis, example);
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

// The sign and the headline of a verdict, with how it failed; or another headline, beside the sign of a failure that is known.
function signed(verdict, kind, other) {
  const [state, headline] = other ? ["known", other] : MATRIX.headlines[verdict];
  const sign = made("span", "", MATRIX.signs[state]);
  sign.ariaHidden = "true";
  return made("span", `s ${state.replace(" ", "-")}`, sign, ` ${headline}${kind && !other ? `: ${kind}` : ""}`);
}

// The verdict on each device.
function listedDevices(found) {
  const said = (one) => (one.reason && one.reason !== found.reason ? ` ${one.reason}` : "");
  const lines = found.devices.map((one) => made("li", "", `${MATRIX.devices[one.device]}: `, signed(one.verdict), said(one)));
  return made("ul", "devices", ...lines);
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
    const given = Object.entries(fields).map(([axis, [name]]) => [name, asked[axis]]).filter(([name, text]) => text || name === "transformers");
    location.assign(`${form.getAttribute("action")}?${new URLSearchParams(given)}`);
    return;
  }
  for (const name of names) if (name !== "text") form.elements[name].value = typed[name];
  const found = answer(asked);
  place.append(made("p", "verdict", signed(found.verdict, found.kind, found.mixed), " ", made("span", "close", MATRIX.closeness[found.closeness])));
  if (found.reason) place.append(made("p", "why", found.reason));
  if (found.devices.length > 1 && found.verdict !== "refused") place.append(listedDevices(found));
  if (found.evidence.length) place.append(listed(found.evidence, asked));
  if (found.against.length) place.append(made("p", "", "What fails next to it:"), listed(found.against, asked));
  if (found.works && !found.evidence.includes(found.works)) place.append(made("p", "", "The nearest combination that works:"), listed([found.works], asked));
  mine(asked);
}

// Mark the row and the column of the reader in the grids of such cells, and scroll to the column; or else name the page with one.
function mine(asked) {
  const fits = (axes) => Object.entries(axes).every(([axis, value]) => !asked[axis] || related(value, asked[axis]));
  const mark = (one, is) => one.classList.toggle("yours", is);
  const tables = [...document.querySelectorAll("table.grid")].map((table) => [table, fits(JSON.parse(table.dataset.axes))]);
  const grid = tables.some(([, fit]) => fit) ? null : MATRIX.grids.find((one) => fits(one.axes));
  if (grid) document.getElementById("answer").append(made("p", "", "Its grid: ", Object.assign(made("a", "", grid.name), { href: `${grid.file}#grid` })));
  for (const [table, fit] of tables) {
    const [transformers, torch] = [asked.transformers, asked.torch].map((text) => (fit ? text.split(".").slice(0, 2).join(".") : ""));
    const heads = [...table.tHead.rows[0].cells];
    const column = heads.findIndex((head) => head.dataset.value === torch && torch);
    for (const row of table.rows) {
      const own = Boolean(row.cells[0].dataset.value) && row.cells[0].dataset.value === transformers;
      mark(row.cells[0], own);
      [...row.cells].slice(1).forEach((cell, place) => mark(cell, place + 1 === column && (own || cell === heads[column])));
    }
    scrolled(table);
  }
}

// A phone shows only some of the columns.
function scrolled(table) {
  const head = table.querySelector("thead th.yours");
  if (head) table.parentElement.scrollLeft = head.offsetLeft - table.querySelector("tbody th").offsetWidth;
}

if (typeof document !== "undefined") {
  const form = document.getElementById("ask");
  form.hidden = false;
  document.querySelectorAll("table.grid").forEach(scrolled);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show(form);
  });
}
