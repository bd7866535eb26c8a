// Data, figures in words, and a builder of elements that only ever sets text: nothing from a run becomes markup.
const page = JSON.parse(document.getElementById("data").textContent);
page.cases.forEach((row, index) => { row.index = index; });
const byId = new Map(page.cases.map((row) => [row.id, row]));
const state = { kinds: new Set(), axes: {}, search: "", sort: null, up: false, open: null, at: null, all: false };

const $ = (id) => document.getElementById(id);

/** An element: a name that it has is set as a property, `on` holds listeners, children that are nothing fall out. */
function el(tag, about = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (name === "on") Object.entries(value).forEach(([event, act]) => node.addEventListener(event, act));
    else if (name === "class") node.className = value;
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function svg(tag, about = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(about)) node.setAttribute(name, value);
  return node;
}

function number(figure) {
  if (figure === null || figure === undefined) return "–";
  if (figure === 0) return "0";
  const size = Math.abs(figure);
  if (size >= 1000 || size < 0.001) return figure.toExponential(2);
  return figure.toFixed(Math.max(0, 2 - Math.floor(Math.log10(size))));
}

function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  let figure = count;
  while (Math.abs(figure) >= 1024 && place < units.length - 1) { figure /= 1024; place += 1; }
  return `${figure.toFixed(place === 0 || figure >= 1000 ? 0 : figure >= 10 ? 1 : 2)}\u00a0${units[place]}`;
}

const span = (seconds) => (seconds === null || seconds === undefined ? "–" : `${seconds.toFixed(2)}\u00a0s`);

function figure(name, value) {
  if (name === "peak" || name === "allocated_peak_bytes") return bytes(value);
  return name === "seconds" ? span(value) : number(value);
}

const TITLES = {
  peak: "Peak memory", allocated_peak_bytes: "Peak memory", seconds: "Seconds", rmse: "RMSE", lpips_alex: "LPIPS",
  tile_seam: "Seam", ssim: "SSIM", psnr: "PSNR",
};
const title = (name) => TITLES[name] || name;
const units = Object.assign({}, ...page.cases.map((row) => row.units));
const unit = (name) => units[name] || "";
const measured = [...new Set(page.cases.flatMap((row) => Object.keys(row.values)))];
const judged = page.cases.filter((row) => row.kind !== "not_applicable");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const kindColour = (kind) => colour(kind === "not_applicable" ? "none" : kind);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const linkTo = (id) => `#case=${encodeURIComponent(id)}`;
const emulatedTag = (row) => (row.emulated ? el("em", { class: "tag" }, "emulated") : null);

function kindMark(kind) {
  return el("i", { class: "mark", "aria-hidden": "true" }, page.kinds[kind].mark);
}

function verdictWords(row) {
  if (row.kind === "expected") return "failed as expected";
  if (row.kind === "surprise") return row.verdict === "pass" ? "passed, unexpectedly" : "failed";
  return { pass: "passed", error: "error", not_applicable: "not applicable" }[row.kind];
}

function choice(label, options, value, act) {
  const select = el("select", { on: { change: (event) => act(event.target.value) } });
  for (const [key, text] of options) select.append(el("option", { value: key, selected: key === value }, text));
  return el("label", {}, label, select);
}

function check(label, value, act) {
  const box = el("input", { type: "checkbox", checked: value, on: { change: (event) => act(event.target.checked) } });
  return el("label", { class: "check" }, box, label);
}

/** A table of cells that are text or elements. "#" before a column's name: figures; "~": left out on phones. */
function grid(columns, rows, about = {}) {
  const [signs, names] = [/^[#~]*/, columns.map((name) => name.replace(/^[#~]+/, ""))];
  const kinds = columns.map((name) => name.match(signs)[0].replace("#", "n ").replace("~", "wide").trim());
  const line = (cells, tag) => el("tr", {}, ...cells.map((cell, place) => el(tag, { class: kinds[place] }, cell)));
  const head = line(names, "th");
  const table = el("table", about, el("thead", {}, head), el("tbody", {}, ...rows.map((cells) => line(cells, "td"))));
  return el("div", { class: "scroll" }, table);
}

function facts(pairs) {
  const lines = pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("dl", { class: "facts one" }, ...lines);
}

/** A command in a box, with a button that copies it. */
function command(text, name) {
  const button = el("button", { type: "button", "data-act": name }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return el("div", { class: "cmd" }, el("code", {}, text), button);
}

async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or a page from disk: the old way
    const area = el("textarea", { value: text });
    button.after(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  button.textContent = done ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
