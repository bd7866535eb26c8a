// The table: filtered by verdict, setting and search, sorted, worst first until someone asks for another order.
const COLUMNS = [
  { key: "plan", title: "Plan" }, { key: "kind", title: "Verdict" }, { key: "rmse" }, { key: "lpips_alex", wide: true },
  { key: "tile_seam", wide: true }, { key: "ssim", wide: true }, { key: "peak" }, { key: "seconds", wide: true },
].filter((column) => column.title || ["peak", "seconds"].includes(column.key) || measured.includes(column.key));
const ROWS = 100;
let found = null;

function matches(row) {
  if (state.kinds.size ? !state.kinds.has(row.kind) : row.kind === "not_applicable") return false;
  for (const [axis, wanted] of Object.entries(state.axes)) if (wanted !== "" && (row.axes[axis] ?? "off") !== wanted) return false;
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
  if (typeof left !== "number" || typeof right !== "number") return (typeof right === "number") - (typeof left === "number") || a.index - b.index;
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

function drawFilters() {
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Verdict" });
  for (const [kind, about] of Object.entries(page.kinds)) {
    const count = page.cases.filter((row) => row.kind === kind).length;
    if (!count) continue;
    chips.append(el("button", {
      type: "button", class: `k-${kind}`, "aria-pressed": String(state.kinds.has(kind)), "data-filter": kind,
      on: { click: () => { if (!state.kinds.delete(kind)) state.kinds.add(kind); filtered(); refocus(`[data-filter="${kind}"]`); } },
    }, kindMark(kind), ` ${about.title} ${count}`));
  }
  const selects = Object.entries(page.axes).map(([axis, values]) => {
    if (values.length < 2) return null;
    const label = choice(axis, [["", "any"], ...values.map((value) => [value, value])], state.axes[axis] ?? "", (value) => {
      state.axes[axis] = value; filtered(); refocus(`[data-axis="${CSS.escape(axis)}"]`);
    });
    label.lastChild.dataset.axis = axis;
    return label;
  });
  const search = el("input", { type: "search", id: "search", value: state.search, placeholder: "id, plan, diagnosis", size: 18,
    on: { input: (event) => { state.search = event.target.value; found = null; state.all = false; drawTable(); drawChart(); } } });
  const reset = el("button", { type: "button", class: "quiet", on: { click: () => { state.kinds.clear(); state.axes = {}; state.search = ""; state.sort = null; filtered(); } } }, "Reset");
  $("filters").replaceChildren(el("label", {}, "Search", search), ...selects.filter(Boolean), reset, chips);
}

function refocus(selector) {
  const node = $("filters").querySelector(selector);
  if (node) node.focus();
}

function drawTable() {
  const rows = visible();
  const head = el("tr");
  for (const column of COLUMNS) {
    const numeric = !column.title;
    const cell = el("th", { class: [numeric ? "n" : "", column.wide ? "wide" : ""].join(" "), scope: "col" });
    const sorted = state.sort === column.key;
    if (sorted) cell.setAttribute("aria-sort", state.up ? "ascending" : "descending");
    cell.append(el("button", { type: "button", "data-sort": column.key, on: { click: () => sortBy(column.key) } }, `${column.title || title(column.key)}${sorted ? (state.up ? " ↑" : " ↓") : ""}`));
    head.append(cell);
  }
  $("table").tHead.replaceChildren(head);
  const shown = state.all ? rows : rows.slice(0, ROWS);
  $("table").tBodies[0].replaceChildren(...shown.map(rowOf));
  const hidden = page.cases.length - rows.length;
  $("shown").textContent = `${plural(rows.length, "case")}, ${state.sort === null ? "worst first" : `by ${title(state.sort)}`}${hidden ? `; ${hidden} filtered out${state.kinds.size ? "" : ", those that could not apply among them"}` : ""}`;
  if (!page.cases.some((row) => row.kind === "not_applicable")) $("shown").textContent = $("shown").textContent.replace(", those that could not apply among them", "");
  $("all-rows").hidden = shown.length === rows.length;
  $("all-rows").textContent = `Show all ${rows.length}`;
}

function sortBy(key) {
  if (state.sort === key) state.up = !state.up;
  else { state.sort = key; state.up = key === "plan"; }
  found = null;
  drawTable();
  $("table").tHead.querySelector(`[data-sort="${key}"]`).focus();
}

function rowOf(row) {
  const line = el("tr", { class: `k-${row.kind}`, on: {
    click: (event) => { if (!event.target.closest("a")) openCase(row.id); },
    mouseenter: () => showPoint(row.id), mouseleave: () => showPoint(null),
  } });
  line.dataset.id = row.id;
  for (const column of COLUMNS) {
    if (column.key === "plan") {
      line.append(el("td", {}, el("a", { href: `#case=${encodeURIComponent(row.id)}` }, row.words), row.emulated ? " " : "", row.emulated ? el("em", { class: "tag" }, "emulated") : "",
        el("span", { class: "place" }, `${row.axes.model} / ${row.axes.latents}`)));
    } else if (column.key === "kind") {
      line.append(el("td", {}, el("span", { class: "verdict" }, kindMark(row.kind), ` ${verdictWords(row)}`), row.diagnosis.length ? el("span", { class: "place" }, row.diagnosis.join(", ")) : ""));
    } else {
      const exact = row.exact.includes(column.key) && row.values[column.key] === 0;
      line.append(el("td", { class: `n${column.wide ? " wide" : ""}` }, exact ? "exact" : figure(column.key, row.values[column.key])));
    }
  }
  return line;
}

/** Link from the chart to the table: mark the case's row. */
function pointTo(id) {
  for (const line of $("table").tBodies[0].querySelectorAll("tr.at")) line.classList.remove("at");
  const line = id === null ? null : [...$("table").tBodies[0].rows].find((candidate) => candidate.dataset.id === id);
  if (line) line.classList.add("at");
  return line;
}

/** Move the marked row by `step`, and keep it in view. */
function walk(step) {
  const rows = $("table").tBodies[0].rows;
  if (!rows.length) return;
  state.at = Math.min(rows.length - 1, Math.max(0, state.at + step));
  const line = pointTo(rows[state.at].dataset.id);
  line.scrollIntoView({ block: "nearest", behavior: "instant" });
  showPoint(line.dataset.id);
}
