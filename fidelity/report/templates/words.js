// Data, figures in words, and a builder of elements that only ever sets text: nothing from a run becomes markup.
const page = JSON.parse(document.getElementById("data").textContent);
page.cases.forEach((row, index) => { row.index = index; });
const byId = new Map(page.cases.map((row) => [row.id, row]));
const state = { kinds: new Set(), axes: {}, search: "", sort: null, up: false, open: null, at: -1, all: false };

const $ = (id) => document.getElementById(id);

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

function figure(name, value) {
  if (name === "peak") return bytes(value);
  if (name === "seconds") return value === null || value === undefined ? "–" : `${value.toFixed(2)}\u00a0s`;
  return number(value);
}

const TITLES = {
  peak: "Peak memory", seconds: "Seconds", rmse: "RMSE", lpips_alex: "LPIPS", tile_seam: "Seam", ssim: "SSIM", psnr: "PSNR",
};
const title = (name) => TITLES[name] || name;
const unit = (name) => {
  const row = page.cases.find((candidate) => candidate.units[name]);
  return row ? row.units[name] : "";
};
const measured = [...new Set(page.cases.flatMap((row) => Object.keys(row.values)))];
const judged = page.cases.filter((row) => row.kind !== "not_applicable");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const kindColour = (kind) => colour(kind === "not_applicable" ? "none" : kind);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

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

async function copy(text, button) {
  const said = button.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { value: text });
    button.after(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  button.textContent = done ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { button.textContent = said; }, 1500);
}
