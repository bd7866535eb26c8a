// The figures of one case: measurements, tone per tile, memory over the decode, receipts.
function measurements(detail) {
  const blamed = new Set(detail.reasons.map((reason) => reason.name));
  const rank = ([name]) => (blamed.has(name) ? 0 : detail.limits[name] ? 1 : page.main.includes(name) ? 2 : 3);
  const { approved } = detail;
  const columns = ["measured", "#worst", "limit", ...(approved ? ["#approved"] : []), "~where the limit comes from",
    "#~per image", "where"];
  const sorted = Object.entries(detail.measurements).sort((a, b) => rank(a) - rank(b));
  const rows = sorted.map(([name, m]) => [nameOf(name, m), valueOf(m), detail.limit_words[name] || "",
    ...(approved ? [number(approved.values[name])] : []), detail.limits[name]?.origin ?? "",
    m.per_image.length > 1 ? m.per_image.map(number).join(" · ") : "", placeOf(m)]);
  const box = grid(columns, rows, { class: "measured" });
  const lines = [...box.querySelectorAll("tbody tr")];
  lines.forEach((line, place) => line.classList.toggle("over", blamed.has(sorted[place][0])));
  return el("div", {}, approved ? approvedNote(approved) : null, box);
}

function approvedNote(approved) {
  const held = approved.gated ? "worse than these by more than the noise floor would fail" : "shown, not gated";
  return el("p", { class: "note" }, `Approved values are of ${approved.environment_class}: ${held}.`);
}

const nameOf = (name, m) => el("span", {}, name,
  m.detection_limit === undefined ? null : el("small", {}, `sees from ${number(m.detection_limit)}`));

function valueOf(m) {
  if (m.exact) return "exact";
  if (m.value === undefined) return el("span", { class: "why" }, m.reason || "not measured");
  return el("span", {}, number(m.value), m.unit && m.unit !== "1" ? el("small", {}, m.unit) : null);
}

function placeOf(m) {
  const where = m.where ?? {};
  const spot = Number.isFinite(where.x) && Number.isFinite(where.y) ? `${where.x}, ${where.y}` : "";
  const said = [where.frame === undefined ? "" : `frame ${where.frame}`, spot].filter(Boolean).join(": ");
  if (!viewer || !spot) return said;
  return el("button", { type: "button", title: "Show this place", on: { click: () => viewer.jump(where) } }, said);
}

/** Offsets per tile, as the tone detector stored them (row by row), as a heat map; a click on a tile shows it. */
function tones(detail) {
  const found = detail.measurements.tile_tone;
  const offsets = found?.details?.offsets;
  const axes = detail.receipts.tiling?.grid;
  const whole = Array.isArray(offsets) && offsets.length && offsets.every((value) => typeof value === "number");
  if (!axes || !whole) return null;
  const most = Math.max(...offsets.map(Math.abs), 1e-9);
  const wide = axes.cols.starts.length;
  const middle = (axis, place) => Math.round((axis.starts[place] + (axis.starts[place + 1] ?? axis.size)) / 2);
  const table = el("table", { class: "heat", "aria-label": "Offset of each tile in grey levels" });
  for (let row = 0; row * wide < offsets.length; row += 1) {
    table.append(el("tr", {}, ...offsets.slice(row * wide, (row + 1) * wide).map((value, col) => {
      const cell = el("td", {}, `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`);
      const tint = colour(value > 0 ? "surprise" : "pass");
      cell.style.background = `color-mix(in srgb, ${tint} ${Math.round((45 * Math.abs(value)) / most)}%, transparent)`;
      const place = { ...found.where, x: middle(axes.cols, col), y: middle(axes.rows, row) };
      if (viewer) cell.addEventListener("click", () => viewer.jump(place));
      return cell;
    })));
  }
  return el("div", {}, el("div", { class: "scroll" }, table), el("p", { class: "note" },
    `Grey levels from the median of all tiles; orange is brighter, blue darker. Click a tile to see it.`));
}

/** Lists as 3, 3, 2, lists of shapes as 2×4×16×16, 2×4×12×16; anything else as JSON has it. */
function seenWords(value) {
  if (!Array.isArray(value)) return typeof value === "object" ? JSON.stringify(value) : String(value);
  return value.map((each) => (Array.isArray(each) ? each.map(seenWords).join("×") : seenWords(each))).join(", ");
}

const QUIET = ["requested", "engaged", "reason", "grid"];

function receipts(detail) {
  const pairs = Object.entries(detail.receipts).map(([option, seen]) => {
    const engaged = { true: "ran", false: "did not run", null: "cannot be proved" }[String(seen.engaged)] ?? "";
    const said = ([key, value]) => !QUIET.includes(key) && value !== null && String(value) !== "";
    const told = Object.entries(seen).filter(said).map(([key, value]) => `${key} ${seenWords(value)}`);
    const ran = seen.requested === false ? "not requested" : engaged;
    return [option, [ran, seen.reason, ...told].filter(Boolean).join("; ")];
  });
  return el("div", {}, el("h3", {}, "Receipts"),
    pairs.length ? facts(pairs) : el("p", { class: "soft" }, "None: nothing was decoded."));
}
