// One case: built when it is opened, so that a thousand cases cost nothing until then.
let viewer = null;
let look = {}; // how the case before was looked at, for the next one
let drawn = []; // charts of the open case, but for the viewer's own

function openCase(id) {
  const row = byId.get(id);
  if (!row) return;
  if (location.hash !== linkTo(id)) history[state.open === null ? "pushState" : "replaceState"](null, "", linkTo(id));
  leave();
  const detail = JSON.parse($(`case-${row.index}`).textContent);
  state.open = id;
  viewer = Object.values(detail.images).some((list) => list.length) ? new Viewer(detail, look) : null;
  $("detail").replaceChildren(head(row), body(row, detail));
  $("detail").scrollTop = 0;
  if (!$("detail").open) { $("detail").showModal(); $("detail").focus(); }
  if (viewer) viewer.show();
  state.at = id;
  pointTo(id);
}

/** The open case in the colours of another theme: its pictures, their place and mode stay as they are. */
function recolour() {
  if (state.open === null) return;
  const row = byId.get(state.open);
  const [top, detail] = [$("detail").scrollTop, JSON.parse($(`case-${row.index}`).textContent)];
  drawn.forEach((chart) => chart.destroy());
  drawn = [];
  $("detail").replaceChildren(head(row), body(row, detail));
  $("detail").scrollTop = top;
  if (viewer?.loaded) viewer.paint();
}

/** Give back what the open case holds. */
function leave() {
  if (viewer) look = viewer.look();
  viewer?.close();
  drawn.forEach((chart) => chart.destroy());
  [viewer, drawn] = [null, []];
}

function closeCase() {
  leave();
  look = {};
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
  const button = (label, name, about) =>
    el("button", { type: "button", "aria-label": name, title: name, ...about }, label);
  const act = (label, name, step) =>
    button(label, name, { disabled: !rows[place + step], on: { click: () => turn(step) } });
  return el("div", { class: `dhead k-${row.kind}` },
    el("div", {}, el("h2", { id: "detail-title" }, kindMark(row.kind), ` ${row.words} `, emulatedTag(row)),
      el("span", { class: "id" }, row.id)),
    act("↑", "Previous case (k)", -1), act("↓", "Next case (j)", 1),
    button("✕", "Close (Esc)", { "data-act": "close", on: { click: closeCase } }));
}

function body(row, detail) {
  const parts = [verdict(row, detail)];
  if (viewer) parts.push(viewer.root);
  else if (row.kind !== "not_applicable") {
    parts.push(el("p", { class: "missing" }, "No pictures were stored for this case."));
  }
  if (Object.keys(detail.measurements).length) parts.push(el("h3", {}, "Measurements"), measurements(detail));
  const heat = tones(detail);
  if (heat) parts.push(el("h3", {}, "Tone per tile"), heat);
  if (row.kind !== "not_applicable") parts.push(memory(detail, row), receipts(detail));
  if (detail.reproduce) parts.push(el("h3", {}, "Reproduce"), command(detail.reproduce, "copy"));
  if (detail.code) {
    parts.push(el("h3", {}, "Reproduction without fidelity"), command(detail.code, "copy-code"));
  }
  if (detail.approve) {
    parts.push(el("h3", {}, "Approve what it measured"), command(detail.approve, "copy-approve"),
      el("p", { class: "note" }, "Replaces the approved values of this case, in the environment class that runs it."));
  }
  return el("div", { class: "dbody" }, ...parts);
}

/** How it ended, what was expected, why, and what that means. */
function verdict(row, detail) {
  const blame = detail.diagnosis.length ? ` (${detail.diagnosis.join(", ")})` : "";
  const wantedFor = detail.expected_diagnosis.length ? ` for ${detail.expected_diagnosis.join(", ")}` : "";
  const because = detail.expected_reason ? `: ${detail.expected_reason}` : "";
  const wanted = detail.expected === "pass" ? "" : `, expected ${detail.expected}${wantedFor}${because}`;
  const box = el("div", { class: `k-${row.kind}` }, el("p", { class: "badge" }, kindMark(row.kind), " ",
    el("b", {}, verdictWords(row)), row.kind === "not_applicable" ? "" : `${blame}${wanted}`));
  const meaning = detail.diagnosis.map((name) => page.glossary[name]).filter(Boolean);
  if (meaning.length) box.append(el("p", { class: "meaning" }, meaning.join(" ")));
  const list = (lines, about) => {
    if (lines.length) box.append(el("ul", about, ...lines.map((line) => el("li", {}, line))));
  };
  list(detail.reasons.map((reason) => reason.message), { class: "reasons" });
  list(detail.notes, { class: "reasons soft" });
  return box;
}
