// One case: built when it is opened, so that a thousand cases cost nothing until then.
let viewer = null;

function openCase(id) {
  const row = byId.get(id);
  const hash = `#case=${encodeURIComponent(id)}`;
  if (!row) return;
  if (location.hash !== hash) history[state.open === null ? "pushState" : "replaceState"](null, "", hash);
  if (viewer) viewer.close();
  const detail = JSON.parse($(`case-${row.index}`).textContent);
  state.open = id;
  viewer = Object.values(detail.images).some((list) => list.length) ? new Viewer(detail) : null;
  $("detail").replaceChildren(head(row), body(row, detail));
  $("detail").scrollTop = 0;
  if (!$("detail").open) { $("detail").showModal(); $("detail").focus(); }
  if (viewer) viewer.show();
  state.at = visible().findIndex((other) => other.id === id);
  pointTo(id);
}

function closeCase() {
  if (viewer) viewer.close();
  viewer = null;
  state.open = null;
  if ($("detail").open) $("detail").close();
  $("detail").replaceChildren();
  if (location.hash.startsWith("#case=")) history.replaceState(null, "", location.pathname + location.search);
}

/** The next case in the table's order, or the one before. */
function turn(step) {
  const rows = visible();
  const place = rows.findIndex((row) => row.id === state.open);
  const next = rows[place < 0 ? 0 : place + step];
  if (next) openCase(next.id);
}

function head(row) {
  const rows = visible();
  const place = rows.findIndex((other) => other.id === row.id);
  const act = (label, name, step) => el("button", { type: "button", "aria-label": name, title: name, disabled: !rows[place + step], on: { click: () => turn(step) } }, label);
  return el("div", { class: `dhead k-${row.kind}` },
    el("div", {}, el("h2", { id: "detail-title" }, kindMark(row.kind), ` ${row.words}`, row.emulated ? " " : "", row.emulated ? el("em", { class: "tag" }, "emulated") : ""), el("span", { class: "id" }, row.id)),
    act("↑", "Previous case (k)", -1), act("↓", "Next case (j)", 1),
    el("button", { type: "button", "aria-label": "Close (Esc)", title: "Close (Esc)", "data-act": "close", on: { click: closeCase } }, "✕"));
}

function body(row, detail) {
  const parts = [verdict(row, detail)];
  if (viewer) parts.push(viewer.root);
  else if (row.kind !== "not_applicable") parts.push(el("p", { class: "missing" }, "No pictures were stored for this case."));
  if (Object.keys(detail.measurements).length) parts.push(el("h3", {}, "Measurements"), measurements(detail));
  const heat = tones(detail);
  if (heat) parts.push(el("h3", {}, "Tone per tile, grey levels from the median of all tiles"), heat);
  if (detail.reproduce) parts.push(el("h3", {}, "Reproduce"), command(detail.reproduce));
  parts.push(el("div", { class: "cols" }, memory(detail, row), receipts(detail)));
  return el("div", { class: "dbody" }, ...parts);
}

function verdict(row, detail) {
  const wanted = detail.expected === "pass" ? "" : `, expected ${detail.expected}${detail.expected_diagnosis.length ? ` for ${detail.expected_diagnosis.join(", ")}` : ""}${detail.expected_reason ? `: ${detail.expected_reason}` : ""}`;
  const blame = detail.diagnosis.length ? ` (${detail.diagnosis.join(", ")})` : "";
  const words = el("div", { class: `k-${row.kind}` }, el("p", { class: "badge" }, kindMark(row.kind), " ", el("b", {}, verdictWords(row)), `${blame}${row.kind === "not_applicable" ? "" : wanted}`));
  if (detail.reasons.length) words.append(el("ul", { class: "reasons" }, ...detail.reasons.map((reason) => el("li", {}, reason.message))));
  if (detail.notes.length) words.append(el("ul", { class: "reasons soft" }, ...detail.notes.map((note) => el("li", {}, note))));
  return words;
}

function measurements(detail) {
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "name"), el("th", { class: "n" }, "worst"), el("th", {}, "unit"), el("th", {}, "limit"), el("th", { class: "wide" }, "where the limit comes from"), el("th", { class: "n wide" }, "per image"), el("th", {}, "where"))));
  const lines = el("tbody");
  const blamed = new Set(detail.reasons.map((reason) => reason.name));
  const rank = ([name]) => (blamed.has(name) ? 0 : detail.limits[name] ? 1 : page.main.includes(name) ? 2 : 3);
  for (const [name, m] of Object.entries(detail.measurements).sort((a, b) => rank(a) - rank(b))) {
    const where = m.where || {};
    const spot = Number.isFinite(where.x) && Number.isFinite(where.y);
    const place = spot && viewer ? el("button", { type: "button", on: { click: () => viewer.jump({ image: where.image ?? 0, x: where.x, y: where.y }) } }, `${where.x}, ${where.y}`) : spot ? `${where.x}, ${where.y}` : "";
    const value = m.exact ? "exact" : m.value === null ? el("span", { class: "soft" }, m.reason || "not measured") : number(m.value);
    const floor = m.detection_limit === null ? "" : el("span", { class: "soft" }, ` sees from ${number(m.detection_limit)}`);
    lines.append(el("tr", { class: blamed.has(name) ? "over" : "" }, el("td", {}, name), el("td", { class: m.value === null && !m.exact ? "" : "n" }, value), el("td", {}, m.unit, floor), el("td", { class: "nowrap" }, detail.limit_words[name] || ""),
      el("td", { class: "wide soft" }, detail.limits[name]?.origin || ""), el("td", { class: "n wide" }, m.per_image.length > 1 ? m.per_image.map(number).join(" · ") : ""), el("td", { class: "nowrap" }, place)));
  }
  table.append(lines);
  return el("div", { class: "scroll" }, table);
}

function command(text) {
  const button = el("button", { type: "button", "data-act": "copy" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  return el("div", { class: "cmd" }, el("code", {}, text), button);
}

function memory(detail, row) {
  const trace = detail.memory;
  const box = el("div", {}, el("h3", {}, "Memory and time"));
  const pairs = [];
  if (trace && trace.reason) box.append(el("p", { class: "soft" }, trace.reason));
  if (trace) for (const [key, label] of [["allocated_peak_bytes", "allocated peak"], ["resident_peak_bytes", "resident peak"], ["reserved_peak_bytes", "reserved peak"], ["weights_bytes", "weights"]]) if (trace[key] !== null) pairs.push([label, bytes(trace[key])]);
  if (trace && trace.method) pairs.push(["method", trace.method]);
  for (const [name, value] of Object.entries(detail.seconds)) pairs.push([`${name}${row.emulated && name === "decode" ? " (emulated)" : ""}`, `${value.toFixed(2)} s`]);
  box.append(facts(pairs));
  if (trace && trace.stages.length) {
    const most = Math.max(...trace.stages.map((stage) => stage.peak_bytes), 1);
    const list = el("div", { class: "stages" });
    for (const stage of trace.stages) {
      const bar = el("i", { "aria-hidden": "true" });
      bar.style.width = `${(100 * stage.peak_bytes) / most}%`;
      list.append(el("span", {}, `${stage.name}${stage.calls > 1 ? ` ×${stage.calls}` : ""}`), bar, el("span", {}, bytes(stage.peak_bytes)));
    }
    box.append(el("h3", {}, "Peak of each stage"), list);
  }
  return box;
}

function receipts(detail) {
  const box = el("div", {}, el("h3", {}, "Receipts"));
  const pairs = [];
  for (const [option, seen] of Object.entries(detail.receipts)) {
    const engaged = { true: "ran", false: "did not run", null: "cannot be proved" }[String(seen.engaged)] ?? "";
    const rest = Object.entries(seen).filter(([key, value]) => !["requested", "engaged", "reason", "grid"].includes(key) && value !== null && String(value) !== "");
    const told = rest.map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`);
    pairs.push([option, [seen.requested === false ? "not requested" : engaged, seen.reason, ...told].filter(Boolean).join("; ")]);
  }
  box.append(pairs.length ? facts(pairs) : el("p", { class: "soft" }, "None: nothing was decoded."));
  return box;
}

function facts(pairs) {
  const list = el("dl", { class: "facts" });
  list.style.gridTemplateColumns = "minmax(0, 1fr)";
  for (const [name, value] of pairs) list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return list;
}

/** Offsets per tile, as the tone detector stored them (row by row), as a heat map. */
function tones(detail) {
  const offsets = detail.measurements.tile_tone?.details?.offsets;
  const wide = detail.receipts.tiling?.grid?.cols.starts.length;
  if (!wide || !Array.isArray(offsets) || !offsets.length || !offsets.every((value) => typeof value === "number")) return null;
  const grid = Array.from({ length: Math.ceil(offsets.length / wide) }, (_, line) => offsets.slice(line * wide, (line + 1) * wide));
  const most = Math.max(...grid.flat().map(Math.abs), 1e-9);
  const table = el("table", { class: "heat", "aria-label": "Offset of each tile in grey levels" });
  for (const line of grid) {
    const row = el("tr");
    for (const value of line) {
      const cell = el("td", {}, `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`);
      cell.style.background = `color-mix(in srgb, ${colour(value > 0 ? "surprise" : "pass")} ${Math.round((45 * Math.abs(value)) / most)}%, transparent)`;
      row.append(cell);
    }
    table.append(row);
  }
  return el("div", { class: "scroll" }, table);
}
