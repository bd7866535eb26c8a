// The table: filtered by verdict, setting and search, sorted, worst first until someone asks for another order.
const COLUMNS = [
  { key: "plan", title: "Plan" }, { key: "kind", title: "Verdict" }, { key: "rmse" }, { key: "lpips_alex", wide: true },
  { key: "tile_seam", wide: true }, { key: "ssim", wide: true }, { key: "peak" }, { key: "seconds", wide: true },
].filter(({ key, title: fixed }) => fixed || ["peak", "seconds"].includes(key) || measured.includes(key));
const ROWS = 100;
let found = null;

function matches(row) {
  if (state.kinds.size ? !state.kinds.has(row.kind) : row.kind === "not_applicable") return false;
  for (const [axis, wanted] of Object.entries(state.axes)) {
    if (wanted !== "" && (row.axes[axis] ?? "off") !== wanted) return false;
  }
  const hay = `${row.id} ${row.words} ${row.diagnosis.join(" ")} ${verdictWords(row)}`.toLowerCase();
  return state.search.toLowerCase().split(/\s+/).every((word) => hay.includes(word));
}

function compare(a, b) {
  const key = state.sort;
  if (key === null) return a.index - b.index;
  const turn = state.up ? 1 : -1;
  if (key === "plan") return turn * a.words.localeCompare(b.words);
  if (key === "kind") return turn * (b.index - a.index);
  const [left, right] = [a.values[key], b.values[key]];
  const known = [left, right].map((value) => typeof value === "number");
  if (!known[0] || !known[1]) return known[1] - known[0] || a.index - b.index;
  return turn * (left - right) || a.index - b.index;
}

/** Rows under the filters, in the order shown. */
function visible() {
  if (found === null) found = page.cases.filter(matches).sort(compare);
  return found;
}

function filtered() {
  found = null;
  state.all = false;
  drawTable();
  drawFilters();
  drawChart();
}

/** Change the filters, and keep the focus where it was. */
function filterBy(change, selector) {
  change();
  filtered();
  if (selector) $("filters").querySelector(selector)?.focus();
}

function drawFilters() {
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Verdict" });
  for (const [kind, about] of Object.entries(page.kinds)) {
    const count = page.cases.filter((row) => row.kind === kind).length;
    if (!count) continue;
    const flip = () => { if (!state.kinds.delete(kind)) state.kinds.add(kind); };
    chips.append(el("button", {
      type: "button", class: `k-${kind}`, "aria-pressed": String(state.kinds.has(kind)), "data-filter": kind,
      on: { click: () => filterBy(flip, `[data-filter="${kind}"]`) },
    }, kindMark(kind), ` ${about.title} ${count}`));
  }
  const selects = Object.entries(page.axes).filter(([, values]) => values.length > 1).map(([axis, values]) => {
    const offered = [["", "any"], ...values.map((value) => [value, value])];
    const label = choice(axis, offered, state.axes[axis] ?? "", (value) =>
      filterBy(() => { state.axes[axis] = value; }, `[data-axis="${CSS.escape(axis)}"]`));
    label.lastChild.dataset.axis = axis;
    return label;
  });
  const type = (event) => {
    state.search = event.target.value;
    [found, state.all] = [null, false];
    drawTable();
    drawChart();
  };
  const search = el("input", { type: "search", id: "search", value: state.search, size: 18,
    placeholder: "id, plan, diagnosis", on: { input: type } });
  const clear = () => { state.kinds.clear(); state.axes = {}; state.search = ""; state.sort = null; };
  const reset = el("button", { type: "button", class: "quiet", on: { click: () => filterBy(clear) } }, "Reset");
  $("filters").replaceChildren(el("label", {}, "Search", search), ...selects, reset, chips);
}

function drawTable() {
  const rows = visible();
  $("table").tHead.replaceChildren(el("tr", {}, ...COLUMNS.map(headOf)));
  $("table").tBodies[0].replaceChildren();
  addRows(rows);
  $("shown").textContent = countOf(rows);
  $("all-rows").textContent = `Show all ${rows.length}`;
  pointTo(state.at);
}

/** The next rows; where all are asked for, the rest follow frame by frame, so that nothing waits for a thousand. */
function addRows(rows) {
  const body = $("table").tBodies[0];
  const from = body.rows.length;
  body.append(...rows.slice(from, from + ROWS).map(rowOf));
  const more = body.rows.length < rows.length;
  $("all-rows").hidden = state.all || !more;
  if (state.all && more) requestAnimationFrame(() => { if (rows === found) addRows(rows); });
}

function countOf(rows) {
  const order = state.sort === null ? "worst first" : `by ${title(state.sort)}`;
  const hidden = page.cases.length - rows.length;
  const silent = !state.kinds.size && page.cases.some((row) => row.kind === "not_applicable");
  const gone = hidden ? `; ${hidden} filtered out${silent ? ", those that could not apply among them" : ""}` : "";
  return `${plural(rows.length, "case")}, ${order}${gone}`;
}

function headOf(column) {
  const kinds = [column.title ? "" : "n", column.wide ? "wide" : ""];
  const cell = el("th", { class: kinds.join(" ").trim(), scope: "col" });
  const sorted = state.sort === column.key;
  if (sorted) cell.setAttribute("aria-sort", state.up ? "ascending" : "descending");
  const arrow = sorted ? (state.up ? " ↑" : " ↓") : "";
  cell.append(el("button", { type: "button", "data-sort": column.key, on: { click: () => sortBy(column.key) } },
    `${column.title || title(column.key)}${arrow}`));
  return cell;
}

function sortBy(key) {
  if (state.sort === key) state.up = !state.up;
  else { state.sort = key; state.up = key === "plan"; }
  found = null;
  drawTable();
  $("table").tHead.querySelector(`[data-sort="${key}"]`).focus();
}

function rowOf(row) {
  const line = el("tr", { class: `k-${row.kind}` }, ...COLUMNS.map((column) => cellOf(row, column)));
  line.dataset.id = row.id;
  return line;
}

/** One listener for all rows: a click opens the case, the pointer marks its point in the chart. */
function watchRows() {
  const rows = $("table").tBodies[0];
  const idOf = (event) => event.target.closest("tr")?.dataset.id ?? null;
  let over = null;
  const point = (id) => { if (id !== over) { over = id; showPoint(id); } };
  rows.addEventListener("click", (event) => { if (!event.target.closest("a")) openCase(idOf(event)); });
  rows.addEventListener("pointerover", (event) => point(idOf(event)));
  rows.addEventListener("pointerleave", () => point(null));
}

function cellOf(row, { key, wide }) {
  const place = (text) => el("span", { class: "place" }, text);
  if (key === "plan") {
    return el("td", {}, el("a", { href: linkTo(row.id) }, row.words), " ", emulatedTag(row),
      place(`${row.axes.model} / ${row.axes.latents}`));
  }
  if (key === "kind") {
    return el("td", {}, el("span", { class: "verdict" }, kindMark(row.kind), ` ${verdictWords(row)}`),
      row.diagnosis.length ? place(row.diagnosis.join(", ")) : "");
  }
  const exact = row.exact.includes(key) && row.values[key] === 0;
  return el("td", { class: wide ? "n wide" : "n" }, exact ? "exact" : figure(key, row.values[key]));
}

/** Link from the chart to the table: mark the case's row. */
function pointTo(id) {
  for (const line of $("table").tBodies[0].querySelectorAll("tr.at")) line.classList.remove("at");
  const line = id === null ? null : [...$("table").tBodies[0].rows].find((candidate) => candidate.dataset.id === id);
  if (line) line.classList.add("at");
  return line;
}

/** Move the mark by `step` in the order shown, past the rows that are drawn too, and keep it in view. */
function walk(step) {
  const rows = visible();
  if (!rows.length) return;
  const from = rows.findIndex((row) => row.id === state.at);
  const next = Math.min(rows.length - 1, Math.max(0, from + step));
  while ($("table").tBodies[0].rows.length <= next) addRows(rows);
  state.at = rows[next].id;
  const line = pointTo(state.at);
  line.scrollIntoView({ block: "nearest", behavior: "instant" });
  showPoint(line.dataset.id);
}
