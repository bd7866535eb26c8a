// Bytes alive over one decode: areas by kind, the stages above them, a line at the peak.
const KINDS = Object.keys(page.memory_kinds);

/** Two digits of base 36 a share, the largest of them `most`. */
function levelsOf(text, most) {
  const levels = [];
  for (let at = 0; at < text.length; at += 2) levels.push((parseInt(text.slice(at, at + 2), 36) * most) / 1295);
  return levels;
}

/** A case's trace with its lines as bytes; null where it has none. */
function traceOf(detail) {
  const stored = detail.memory;
  if (!stored) return null;
  const lines = (text) => levelsOf(text ?? "", stored.most);
  const layers = KINDS.filter((kind) => stored.layers[kind]).map((kind) => [kind, lines(stored.layers[kind])]);
  const timeline = lines(stored.timeline);
  const transfers = stored.transfers && { ...stored.transfers, resident: lines(stored.transfers.resident) };
  // one nameless layer where a trace tells no kinds
  return { ...stored, timeline, transfers, layers: layers.length ? layers : [["", timeline]], told: layers.length > 0 };
}

const swatch = (kind) => el("i", { class: `swatch m-${kind}`, "aria-hidden": "true" });

/** Ticks at a power of two that gives at most so many steps, and more than half of them. */
function ticksTo(most, steps) {
  const step = 2 ** Math.ceil(Math.log2(most / steps));
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, place) => place * step);
}

function timeline(trace) {
  const alive = trace.timeline;
  const { layers, most } = trace;
  const at = alive.indexOf(most);
  const readout = el("p", { class: "readout note", "aria-hidden": "true" });
  const plot = el("div", { class: "areas" }, areas(layers, alive.length, most * 1.06), ...rulers(most * 1.06),
    peakMark(at, alive.length, most));
  const hair = el("i", { class: "hair", hidden: true });
  plot.append(hair);
  const idle = trace.told ? "Point at the picture for what was alive when." : "";
  readout.textContent = idle;
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const place = Math.floor(((event.clientX - box.left) / box.width) * alive.length);
    const share = Math.min(alive.length - 1, Math.max(0, place));
    hair.hidden = false;
    hair.style.left = `${(100 * (share + 0.5)) / alive.length}%`;
    readout.textContent = aliveWords(trace, share);
  });
  plot.addEventListener("pointerleave", () => { hair.hidden = true; readout.textContent = idle; });
  return el("div", { class: "memline" }, el("p", { class: "label" },
    "Bytes alive, weights included, in the order of the allocator's events"),
  el("div", { class: "axis" }, trace.spans?.length ? bands(trace.spans, alive.length) : null, plot), readout);
}

/** One step-shaped area a kind, each on top of those before it. */
function areas(layers, count, top) {
  const picture = svg("svg", { viewBox: `0 0 ${count} 1000`, preserveAspectRatio: "none", role: "img" });
  picture.append(svg("title", {}));
  const y = (value) => (1000 * (1 - value / top)).toFixed(1);
  let floor = new Array(count).fill(0);
  for (const [kind, held] of layers) {
    const roof = held.map((value, place) => value + floor[place]);
    const over = roof.map((value, x) => `${x ? "V" : `M0 `}${y(value)}H${x + 1}`).join("");
    const back = floor.map((value, x) => `V${y(value)}H${x}`);
    picture.append(svg("path", { class: `area m-${kind}`, d: `${over}${back.reverse().join("")}Z` }));
    floor = roof;
  }
  return picture;
}

function rulers(top, steps = 5) {
  return ticksTo(top, steps).map((value) => {
    const label = el("span", {}, bytes(value).replace(/\.0+(?=\u00a0)/, ""));
    const line = el("i", { class: "ruler", "aria-hidden": "true" }, label);
    line.style.bottom = `${(100 * value) / top}%`;
    return line;
  });
}

function peakMark(at, count, most) {
  const mark = el("i", { class: `peakmark${at > count / 2 ? " left" : ""}`, "aria-hidden": "true" },
    el("span", {}, `peak ${bytes(most)}`));
  mark.style.left = `${(100 * (at + 0.5)) / count}%`;
  return mark;
}

/** Which stage ran when. A name that finds no room is still said when pointed at, and in the table below. */
function bands(spans, count) {
  const row = el("div", { class: "bands", "aria-hidden": "true" });
  spans.forEach((part) => {
    const name = spanName(spans, part);
    const wide = (part.stop - part.start) / count;
    const label = wide > 0.009 * name.length ? name : wide > 0.1 ? part.name : "";
    const band = el("span", { class: `stretch s-${part.name}`, title: name }, label);
    band.style.left = `${(100 * part.start) / count}%`;
    band.style.width = `${100 * wide}%`;
    row.append(band);
  });
  return row;
}

/** `tile 3 of 9`, `encode PNG`, `assemble`. */
function spanName(spans, part) {
  if (part.part) return `${part.name} ${part.part}`;
  const same = spans.filter((other) => other.name === part.name && !other.part);
  return part.name === "tile" && same.length > 1 ? `tile ${same.indexOf(part) + 1} of ${same.length}` : part.name;
}

const spanAt = (trace, share) => (trace.spans ?? []).find((part) => part.start <= share && share < part.stop);

function aliveWords(trace, share) {
  const part = spanAt(trace, share);
  const living = trace.layers.filter(([kind, held]) => kind && held[share] > 0);
  const kinds = living.map(([kind, held]) => `${kind} ${bytes(held[share])}`);
  const said = `${part ? `${spanName(trace.spans, part)}: ` : ""}${bytes(trace.timeline[share])} alive`;
  return kinds.length ? `${said}, ${kinds.join(", ")}` : said;
}

/** The picture for whoever does not see it: the worst instant of each stretch, by kind. */
function timelineTable(trace) {
  const layers = trace.told ? trace.layers : [];
  const spans = trace.spans?.length ? trace.spans : [{ name: "decode", start: 0, stop: trace.timeline.length }];
  const rows = spans.map((part) => {
    const held = trace.timeline.slice(part.start, part.stop);
    const worst = part.start + held.indexOf(Math.max(...held));
    return [spanName(spans, part), `${part.start}–${part.stop - 1}`, bytes(trace.timeline[worst]),
      ...layers.map(([, found]) => bytes(found[worst]))];
  });
  return el("details", {}, el("summary", {}, "The picture as a table"),
    grid(["stage", "~shares", "#most alive", ...layers.map(([kind]) => `#~${kind}`)], rows),
    el("p", { class: "note" },
      "The most alive in each stretch, and what it was at that instant, to a thousandth of the peak."));
}
