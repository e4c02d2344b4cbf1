// The form of the first page. It reads what is typed or pasted. A service answers at the address with the releases; in a report the
// answer is found among the results in answers.js, as `verdicts.py` finds it in Python.
"use strict";

const FLASH = /^(?:(?:flash[-_ ]?att(?:n|ention)|fa)(?:[-_ ]?([0-9]))?(?:[-_]fwd)?(?:[\s=@:v-]+(\d[\w.+ -]*))?|v?(\d[\w.+ -]*))$/;

// A release such as 5.9.1; an error if the text isn't one.
function release(text, names, example) {
  if (/[<>~!*,]/.test(text)) throw `'${text}' is a range: one release, such as ${example}`;
  const short = names === "python" && /^(?:python|py|cp)?\s*3(\d{1,2})$/i.exec(text);
  if (short) return `3.${short[1]}`;
  const found = new RegExp(`^(?:(?:${names}|cpython|pytorch|py|cp)[\\s=:-]*)?v?(\\d+(?:\\.\\d+)*)((?:a|b|rc|\\.post|\\.dev)\\d+)*(?:[+ ].*)?$`, "i").exec(text);
  if (!found) throw `'${text}' isn't a release such as ${example}`;
  return found[1] + (found[2] || "");
}

// A FlashAttention, and the version of its package if the text has one.
function flashAttention(text) {
  if (["none", "no", "without", "-"].includes(text)) return ["none", ""];
  if (text === "torch") return ["torch", ""];
  const found = FLASH.exec(text) || [];
  const release = found[2] || found[3] || "";
  const kind = found.length && (found[1] || (release || "2")[0]);
  if (release.includes(".") && version(release)) return [`fa${kind}`, release.split(/[+ ]/)[0]];
  if (!"234".includes(kind || "x")) throw `'${text}' isn't a FlashAttention such as flash-attn 2.8.3, fa4, torch or none`;
  return [`fa${kind}`, ""];
}

// The fields in the output of pip freeze or pip list, a requirements.txt, a uv.lock or a poetry.lock; those that are typed aren't read.
function pasted(text, typed) {
  const found = {};
  const flash = typed["flash-attn"] ? [] : ["flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4"];
  const names = [...["transformers", "torch"].filter((name) => !typed[name]), ...flash];
  for (const [line, from] of text.matchAll(/^[ \t]*(?:(?:-e|--editable)[ \t=]+|(?=git\+))([^\s;]+)/gm)) {
    const name = /(?:egg=|^)([\w.-]+)(?:[[&]|$)|([\w.-]+?)(?:\.git)?\/?(?:@[^/]*)?(?:#.*)?$/.exec(from)?.slice(1).find(Boolean);
    const known = { pytorch: "torch", "flash-attention": "flash-attn" }[name] || name?.replace(/[-_.]+/g, "-").toLowerCase();
    if (names.includes(known)) throw `${line.trim()} isn't a release, and only releases are tested: type the one that it is made from`;
  }
  const locked = [...text.matchAll(/^name\s*=\s*["']([\w.-]+)["']\s*\nversion\s*=\s*["']([^"'\n]+)["']/gm)];
  const listed = /^[ \t]*([A-Za-z0-9][\w.-]*?)[ \t]*(?:\[[^\]\n]*\])?[ \t]*(===?|@|[<>~!]=?|[ \t])[ \t]*([^\s;,\\]+)/gm;
  const every = locked.length ? locked.map((one) => [one[0], one[1], "==", one[2]]) : [...text.matchAll(listed)];
  for (let [line, name, sign, version] of every) {
    name = name.replace(/[-_.]+/g, "-").toLowerCase();
    if (!names.includes(name) || (!sign.trim() && !/^\d/.test(version))) continue;
    if (sign === "@") {
      const wheel = new RegExp(`${name.replace(/-/g, "[-_.]")}-(\\d[^-/]*)(?:-|\\.tar)`).exec(decodeURIComponent(version));
      if (!wheel) throw `${line.trim()} isn't a release, and only releases are tested: type the one that it is made from`;
      version = wheel[1];
    } else if ("<>~!".includes(sign[0])) throw `${line.trim()} is a range: type the release that you have`;
    if (found[name] && found[name] !== version) throw `${name} is there as ${found[name]} and ${version}: type the one that you have`;
    found[name] = version;
  }
  if (![typed.transformers, typed.torch, found.transformers, found.torch].some(Boolean)) throw "neither transformers nor torch is in this text, as in the line torch==2.11.0";
  const own = flash.filter((name) => found[name]).map((name) => `${name} ${found[name]}`);
  if (own.length > 1) throw `${own.join(" and ")} are there: type the one that you use`;
  return { transformers: found.transformers || "", torch: found.torch || "", "flash-attn": own[0] || "none" };
}

// A function of one argument that computes each value once.
function memoised(compute) {
  const values = new Map();
  return (key) => {
    if (!values.has(key)) values.set(key, compute(key));
    return values.get(key);
  };
}

// A version as its release, its suffix, and whether it is a pre-release; null for anything else.
const version = memoised((text) => {
  const found = /^(\d+(?:\.\d+){0,3})((?:a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(?:[+ ].*)?$/.exec(text);
  if (!found) return null;
  const suffix = found.slice(2).map((one) => one || "").join("");
  return { release: found[1].split(".").map(Number), suffix, early: Boolean(found[2] || found[4]) };
});

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
const numbers = memoised((text) => [0, 1, 2].map((place) => version(text || "")?.release[place] || 0));

// The combination as it is meant on a device: there no FlashAttention may mean torch's own.
function meantOn(asked, device) {
  const own = MATRIX.torchs_own && device === "cuda" && asked.flash_attention === "none";
  return own ? { ...asked, flash_attention: "torch" } : asked;
}

// Which of two releases is the newer, by this many of their numbers.
const newer = (there, here, most) => Math.sign([0, 1].slice(0, most).map((place) => there[place] - here[place]).find(Boolean) || 0);

// How far a part of a release is. Of an older series the last release is the nearest, of a newer one the first.
const step = (side, there, here) => (side ? [side * there, 0] : [Math.abs(there - here), Number(there > here)]);

// The distance of a tested combination from the question, as numbers that are compared one after the other.
function distance(one, asked, axes) {
  const minors = [];
  const patches = [];
  const releases = MATRIX.order.filter((axis) => axis !== "flash_attn_package");
  for (const axis of axes) {
    if (!version(asked[axis])) {
      minors.push(Number(one.exact[axis] !== asked[axis]));
      continue;
    }
    const [there, here] = [numbers(one.exact[axis]), numbers(asked[axis])];
    const side = newer(there, here, 1);
    minors.push(Math.abs(there[0] - here[0]), side, ...step(side, there[1], here[1]));
    patches.push(...(same(asked[axis], one.exact[axis] || "") ? [0, 0, 0] : [1, ...step(newer(there, here, 2), there[2], here[2])]));
  }
  return [...minors, ...patches, ...releases.flatMap((axis) => numbers(one.exact[axis]).map((part) => -part))];
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

// For each device and FlashAttention that may be meant: both, and the rules that exclude the combination.
function refusing(asked) {
  const fixed = Object.fromEntries(Object.keys(MATRIX.values).map((axis) => [axis, null]));
  for (const [axis, value] of Object.entries(asked)) if (value) fixed[axis] = version(value)?.release.join(".") || value;
  const found = new Map();
  for (const device of asked.device ? [asked.device] : MATRIX.words.device) {
    for (const word of asked.flash_attention ? [asked.flash_attention] : MATRIX.words.flash_attention) {
      const { flash_attention } = meantOn({ flash_attention: word }, device);
      const meant = { ...fixed, device, flash_attention };
      const rules = MATRIX.rules.filter((rule) => holds(rule.clause, meant));
      found.set(`${device} ${flash_attention}`, { device, flash_attention, rules });
    }
  }
  return [...found.values()];
}

// The reasons of the rules that exclude all of some combinations, or else of the first for each; none if one of them isn't excluded.
function deciding(refusing) {
  if (!refusing.every((one) => one.rules.length)) return "";
  const common = refusing[0].rules.filter((rule) => refusing.every((one) => one.rules.includes(rule)));
  const some = common.length ? common : refusing.map((one) => one.rules[0]);
  return [...new Set(some.map((rule) => rule.because))].join("; ");
}

// An axis as people write it.
const spelled = (axis) => axis.replace(/^flash_attn_package$/, "flash-attn package").replace(/^flash_attention$/, "flash-attn");

// Why nothing of a combination was run.
function neverRun(asked, alike, axes) {
  if (alike.length) return alike[0].reason;
  const none = axes.filter((axis) => !(MATRIX.values[axis] || []).some((value) => related(value, asked[axis])));
  if (!none.length || !Object.keys(MATRIX.values).length) return "no run has planned it";
  return `the matrix has no ${none.map((axis) => `${spelled(axis)} ${asked[axis]}`).join(" and no ")}`;
}

const FINE = ["passed", "flaky", "known"];
const worksIn = (found) => found.filter((one) => FINE.includes(one.verdict)).length;
const isMixed = (found) => worksIn(found) > 0 && worksIn(found) < found.length;

// The verb of combinations that all work or all fail.
const does = (found, end) => (found.every((one) => one.verdict === "wrong") ? `compute${end} something else` : `${worksIn(found) ? "work" : "fail"}${end}`);

// How many combinations work, fail, were never run and are excluded, if they differ in that.
function mixed(found, never, excluded) {
  const [tested, works] = [found.length, worksIn(found)];
  const parts = isMixed(found) ? [`${works} of ${tested} tested combinations work`] : [];
  if (tested && !parts.length) parts.push(`${tested} tested combination${tested > 1 ? "s" : ""} ${does(found, tested > 1 ? "" : "s")}`);
  for (const [number, one, more] of [[never, "was never run", "were never run"], [excluded, "is excluded", "are excluded"]]) {
    const noun = parts.length ? "" : ` combination${number > 1 ? "s" : ""}`;
    if (number) parts.push(`${number}${noun} ${number > 1 ? more : one}`);
  }
  return isMixed(found) || parts.length > 1 ? parts.join(", ") : "";
}

// How other patches did of a combination that was never run.
function patched(found, instead) {
  if (isMixed(found)) return `It was never run; with other patches ${worksIn(found)} of ${found.length} tested combinations work`;
  return `It was never run; it ${does(found, "s")} with ${instead}`;
}

// The requested cells that didn't run: how many of each device and FlashAttention, with the reason if they are excluded.
function openCells(on, axes, ran) {
  const within = (box, cell) => Object.keys({ ...box.axes, ...cell }).every((axis) => axis === "flash_attn_package" || (box.axes[axis] || [""]).includes(cell[axis] || ""));
  return MATRIX.all.map((box) => {
    const [[device], [flash_attention]] = [box.axes.device, box.axes.flash_attention];
    const wanted = axes.filter((axis) => axis !== "flash_attn_package");
    const fit = (axis) => (box.axes[axis] || []).filter((value) => !wanted.includes(axis) || related(value, on[device][axis])).length;
    const all = wanted.every(fit) ? Object.keys(box.axes).reduce((product, axis) => product * (fit(axis) || 1), 1) : 0;
    return { device, flash_attention, because: box.because, number: all - ran.filter((cell) => within(box, cell)).length };
  }).filter((one) => one.number);
}

// The answer to a question: its verdict, how exact it is, the reason, the verdict on each kernel, the evidence, failures next to it, and
// the nearest combination that works.
function answer(asked) {
  const worst = ["wrong", "failed", "known", "flaky", "passed"];
  const axes = MATRIX.order.filter((axis) => asked[axis]);
  const on = Object.fromEntries(MATRIX.words.device.map((device) => [device, meantOn(asked, device)]));
  const differ = (one) => axes.filter((axis) => !related(one.cell[axis] || "", on[one.cell.device][axis]));
  const other = (one) => axes.filter((axis) => !same(on[one.cell.device][axis], one.exact[axis] || ""));
  const alike = MATRIX.cells.filter((one) => !differ(one).length);
  const ended = alike.filter((one) => one.exact);
  const newest = ended.filter((one) => !other(one).length);
  const fit = newest.length || !ended.length ? newest : MATRIX.earlier.filter((one) => !differ(one).length && !other(one).length);
  const meant = refusing(asked);
  const refused = fit.length ? "" : deciding(meant);
  const places = new Map([MATRIX.cells, MATRIX.earlier].flatMap((some) => some.map((one, place) => [one, place])));
  const far = memoised((one) => [...distance(one, on[one.cell.device], axes), places.get(one)]);
  const near = (a, b) => {
    const [there, here] = [far(a), far(b)];
    const place = there.findIndex((part, number) => part !== here[number]);
    return place < 0 ? 0 : there[place] - here[place];
  };
  const last = new Map();
  for (const one of (fit.length ? [...fit] : refused ? [] : ended).sort((a, b) => (a.began < b.began ? -1 : Number(a.began > b.began)))) {
    const minor = { ...one.exact, python: one.exact.python.split(".").slice(0, 2).join(".") };
    last.set(JSON.stringify(minor), one);
  }
  const found = [...last.values()].sort((a, b) => worst.indexOf(a.verdict) - worst.indexOf(b.verdict) || near(a, b));
  const exact = fit.length ? found : [];
  const minor = found.length ? found[0].verdict : refused ? "refused" : "unknown";
  const verdict = found.length && !fit.length ? "unknown" : minor;
  const tested = FINE.includes(minor) ? [] : MATRIX.cells.filter((one) => one.exact).sort(near);
  const named = axes.filter((axis) => axis !== "python" && version(asked[axis]));
  const whole = exact.length && named.length && named.every((axis) => version(asked[axis]).release.length > 2);
  const sides = new Map();
  for (const one of minor === "unknown" ? tested : []) {
    const [axis, ...others] = differ(one);
    const [there, here] = [numbers(one.cell[axis]), numbers(asked[axis])];
    const side = `${axis} ${(there[0] - here[0] || there[1] - here[1] || there[2] - here[2]) > 0}`;
    if (!others.length && !sides.has(side)) sides.set(side, one);
  }
  const open = openCells(on, axes, [...new Map(fit.map((one) => [JSON.stringify({ ...one.cell, flash_attn_package: "" }), one.cell])).values()]);
  const sum = (some, excluded) => some.reduce((total, one) => total + (Boolean(one.because) === excluded ? one.number : 0), 0);
  const kernels = [];
  for (const { rules, ...kernel } of meant) {
    const of = (one) => one.device === kernel.device && one.flash_attention === kernel.flash_attention;
    const own = exact.filter((one) => of(one.cell));
    const known = Object.entries(kernel).every(([axis, value]) => asked[axis] || (MATRIX.values[axis] || []).includes(value));
    if (!own.length && !known) continue;
    const cells = open.filter(of);
    const is = own.length ? own[0].verdict : rules.length ? "refused" : "unknown";
    const because = [...(own.length ? [own[0].reason] : rules.map((rule) => rule.because)), ...(is === "refused" ? [] : cells.map((one) => one.because))];
    const reason = [...new Set(because.filter(Boolean))].join("; ");
    kernels.push({ ...kernel, verdict: is, sign: isMixed(own) ? "known" : is, reason, mixed: is === "refused" ? "" : mixed(own, sum(cells, false), sum(cells, true)) });
  }
  const nearest = found.length && !fit.length ? [...found].sort(near)[0] : null;
  const instead = nearest && other(nearest).map((axis) => `${spelled(axis)} ${nearest.exact[axis] || ""}`).join(" and ");
  const reason = fit.length ? found[0].reason : refused || (nearest ? `another patch of it was tested: ${instead}` : neverRun(asked, alike, axes));
  return {
    verdict,
    sign: isMixed(exact) ? "known" : verdict,
    kind: verdict === "failed" ? found[0].kind : null,
    mixed: nearest ? patched(found, instead) : refused ? "" : mixed(exact, sum(open, false), sum(open, true)),
    closeness: refused ? "rule" : found.length ? (whole ? "patch" : "minor") : tested.length ? "neighbour" : "none",
    reason: nearest ? found[0].reason : reason || (kernels.length === 1 ? kernels[0].reason : ""),
    kernels,
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
      const found = pasted(values.text, Object.fromEntries(Object.entries(values).map(([name, value]) => [name, value.trim()])));
      typed = Object.fromEntries(Object.keys(values).map((name) => [name, values[name].trim() || found[name] || ""]));
    } catch (error) {
      errors.text = String(error);
    }
  }
  for (const [axis, [name, example]] of Object.entries(fields)) {
    const text = typed[name].trim().replace(/^["'`]+|["'`,;]+$/g, "");
    const word = !["transformers", "torch", "flash-attn", "python"].includes(name) && /^[a-z][a-z0-9_]*$/i.test(text);
    try {
      if (name === "flash-attn" && text) [asked[axis], asked.flash_attn_package] = flashAttention(text.toLowerCase());
      else asked[axis] = !text ? "" : word ? text.toLowerCase() : release(text, axis, example);
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

// The sign of a verdict, and its headline with how it failed; or another headline.
function signed(verdict, kind, other) {
  const [state, own] = MATRIX.headlines[verdict];
  const headline = other || own;
  const sign = made("span", "", MATRIX.signs[state]);
  sign.ariaHidden = "true";
  return made("span", `s ${state.replace(" ", "-")}`, sign, ` ${headline}${kind && !other ? `: ${kind}` : ""}`);
}

// The verdicts on several kernels; those that are alike with all of their names.
function lines(found, asked) {
  const alike = new Map();
  for (const one of found.kernels.length > 1 && found.verdict !== "refused" ? found.kernels : []) {
    const key = JSON.stringify([one.device, one.verdict, one.mixed, one.reason]);
    alike.set(key, [...(alike.get(key) || []), one]);
  }
  return [...alike.values()].map((some) => {
    const others = some.filter((one) => one.flash_attention !== asked.flash_attention);
    const names = [...(asked.device ? [] : [MATRIX.devices[some[0].device]]), ...others.map((one) => MATRIX.kernels[one.flash_attention])];
    return [names.join(", "), some[0]];
  });
}

function listedKernels(found, listed) {
  const said = (one) => (one.reason && one.reason !== found.reason ? ` ${one.reason}` : "");
  const items = listed.map(([names, one]) => made("li", "", `${names}: `, signed(one.sign, null, one.mixed), said(one)));
  return made("ul", "devices", ...items);
}

// The evidence as a list, in which the axes that differ from the question are marked.
function listed(evidence, asked) {
  const list = made("ul", "evidence");
  for (const one of evidence) {
    list.insertAdjacentHTML("beforeend", one.html);
    for (const axis of list.lastElementChild.querySelectorAll("[data-axis]")) {
      const text = meantOn(asked, one.cell.device)[axis.dataset.axis];
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
    const said = { ...asked, flash_attention: [asked.flash_attention, asked.flash_attn_package].filter(Boolean).join(" ") };
    const given = Object.entries(fields).map(([axis, [name]]) => [name, said[axis]]).filter(([name, text]) => text || name === "transformers");
    location.assign(`${form.getAttribute("action")}?${new URLSearchParams(given)}`);
    return;
  }
  for (const name of names) if (name !== "text") form.elements[name].value = typed[name];
  const found = answer(asked);
  place.append(made("p", "verdict", signed(found.sign, found.kind, found.mixed), " ", made("span", "close", MATRIX.closeness[found.closeness])));
  if (found.reason) place.append(made("p", "why", found.reason));
  const kernels = lines(found, asked);
  if (kernels.length) place.append(listedKernels(found, kernels));
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
  // What is pasted replaces what an earlier text or question has left in the fields.
  form.elements.text.addEventListener("paste", () => ["transformers", "torch", "flash-attn"].forEach((name) => (form.elements[name].value = "")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show(form);
  });
}
