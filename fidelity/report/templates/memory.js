// Memory and time of one case: figures, timeline, what was alive at the peak, stages, offload, running out.
const MEMORY = [
  ["allocated_peak_bytes", "allocated", "handed out to tensors and kernels at the worst instant"],
  ["resident_peak_bytes", "resident", "pages that the kernel gave the process"],
  ["reserved_peak_bytes", "reserved", "kept from others by the caching allocator"],
  ["predicted_peak_bytes", "predicted", "from shapes alone; nothing was measured"],
];

const TOOK = { decode: "judged decode", memory: "traced decode", measure: "measuring", oracle: "the oracle" };

function memory(detail, row) {
  const trace = traceOf(detail);
  const box = el("div", { class: "memory" }, el("h3", {}, "Memory and time"));
  if (trace?.exhausted) box.append(exhausted(trace.exhausted, row));
  else if (trace?.reason) box.append(el("p", { class: "soft" }, trace.reason));
  if (trace?.peak) box.append(el("p", { class: "lead" }, peakWords(trace)));
  const figures = MEMORY.filter(([key]) => trace?.[key] !== undefined);
  if (figures.length) box.append(el("ul", { class: "peaks" }, ...figures.map(([key, name, about]) =>
    el("li", {}, el("span", {}, name), el("b", {}, bytes(trace[key])), el("small", {}, about)))));
  if (trace?.timeline.length) {
    const drawing = timeline(trace);
    drawing.querySelector("title").textContent = pictureWords(trace);
    box.append(drawing, timelineTable(trace));
    if (!trace.told) {
      box.append(el("p", { class: "soft" }, "What was alive is not told by kind: this trace kept the sum alone."));
    }
  } else if (trace?.method) {
    box.append(el("p", { class: "soft" }, `No picture over time: ${trace.method} tell peaks alone.`));
  }
  const beside = (...parts) => {
    const there = parts.filter(Boolean);
    if (there.length) box.append(el("div", { class: "cols" }, ...there));
  };
  if (trace) beside(kindTable(trace), stageList(trace));
  if (trace?.peak?.held.length) {
    box.append(heldTable(trace.peak.held, "Alive at the peak"));
    const rest = trace.peak.smaller;
    if (rest) box.append(el("p", { class: "note" }, `… and ${rest} more, each below a thousandth of the peak.`));
  }
  if (trace) beside(afterDecode(trace));
  beside(trace ? offloaded(trace) : null, el("div", {}, el("h4", {}, "Time"), facts(times(detail, row))));
  return box;
}

function times(detail, row) {
  const named = (name) => `${TOOK[name] ?? name} took${row.emulated && name === "decode" ? " (emulated)" : ""}`;
  const pairs = Object.entries(detail.seconds).map(([name, value]) => [named(name), span(value)]);
  return detail.memory?.method ? [...pairs, ["memory measured by", detail.memory.method]] : pairs;
}

function peakWords({ peak, exhausted: stopped }) {
  const where = peak.module ? ` in ${peak.module}` : "";
  const most = stopped ? "Until it ran out, most" : "Most";
  return `${most} was alive in stage ${peak.stage}, while ${peak.operator || "something"} ran${where}.`;
}

function pictureWords(trace) {
  const { most } = trace;
  const part = spanAt(trace, trace.timeline.indexOf(most));
  const kinds = Object.entries(trace.peak?.by_kind ?? {}).map(([kind, held]) => `${kind} ${bytes(held)}`);
  return `Bytes alive over the decode: ${bytes(most)} at most${part ? `, in ${spanName(trace.spans, part)}` : ""}` +
    `${kinds.length ? `: ${kinds.join(", ")}` : ""}. The same as a table below.`;
}

/** The legend of the picture: each kind, what of it was alive at the peak, and what it is. */
function kindTable(trace) {
  const at = trace.timeline.indexOf(trace.most);
  const drawn = Object.fromEntries(trace.layers);
  const shown = KINDS.filter((kind) => trace.peak?.by_kind[kind] || drawn[kind]);
  if (!shown.length) return null;
  const rows = shown.map((kind) => [el("span", { class: "kind" }, swatch(kind), kind),
    bytes(trace.peak?.by_kind ? trace.peak.by_kind[kind] ?? 0 : drawn[kind][at]), page.memory_kinds[kind]]);
  const table = grid(["kind", "#at the peak", "meaning"], rows, { class: "kinds" });
  return el("div", {}, el("h4", {}, "What it was"), table);
}

function heldTable(held, name) {
  const rows = held.map((one) => [
    el("span", { class: "kind" }, swatch(one.kind), one.what || one.kind,
      one.count > 1 ? el("small", {}, ` ×${one.count}`) : null, one.what ? el("small", {}, ` ${one.kind}`) : null),
    bytes(one.bytes), path(one.module), one.shape.join("×"), one.dtype]);
  return el("div", {}, el("h4", {}, name),
    grid(["what", "#bytes", "made in", "~shape", "~dtype"], rows, { class: "held" }));
}

/** A dotted path that may be broken behind its dots. */
function path(dotted) {
  const parts = dotted.split(/(?<=\.)/).flatMap((part, place) => (place ? [el("wbr"), part] : [part]));
  return el("span", { class: "id" }, ...(dotted ? parts : ["–"]));
}

/** The peak of each stage of the decode; those after it stand in a list of their own. */
function stageList(trace) {
  // the decoder's only call is the decode itself
  const found = trace.stages.filter((stage) => stage.name !== "tile" || stage.calls > 1);
  if (!found.length) return null;
  const most = Math.max(...found.map((stage) => stage.peak_bytes ?? 0), 1);
  const list = el("div", { class: "stages", role: "group", "aria-label": "Peak of each stage" });
  for (const stage of found) {
    const bar = el("i", { "aria-hidden": "true" });
    bar.style.width = `${(100 * (stage.peak_bytes ?? 0)) / most}%`;
    const name = [stage.name, stage.part, stage.calls > 1 ? `×${stage.calls}` : ""].filter(Boolean).join(" ");
    list.append(el("span", {}, name), bar, el("span", { title: stage.reason ?? "" }, bytes(stage.peak_bytes)));
    if (stage.each?.length > 1) list.append(el("span", {}), eachCall(stage), el("span", {}));
  }
  const silent = found.filter((stage) => stage.reason);
  const why = [...new Set(silent.map((stage) => `${stage.name}: ${stage.reason}`))];
  return el("div", {}, el("h4", {}, "Peak of each stage"), list,
    ...why.map((reason) => el("p", { class: "note" }, reason)),
    el("p", { class: "note" }, "Each with everything that was alive beside it: they are not added."));
}

/** One small bar a call. */
function eachCall(stage) {
  const [least, most] = [Math.min(...stage.each), Math.max(...stage.each)];
  const said = `peak of each call: ${bytes(least)} to ${bytes(most)}`;
  const bars = svg("svg", { viewBox: `0 0 ${stage.each.length} 100`, preserveAspectRatio: "none", role: "img",
    class: "each", "aria-label": said });
  stage.each.forEach((held, place) => {
    const height = (100 * held) / most;
    const about = { x: place + 0.1, y: 100 - height, width: 0.8, height, class: held === most ? "most" : "" };
    const bar = svg("rect", about);
    bar.append(svg("title", {}));
    bar.firstChild.textContent = `${stage.name} ${place + 1}: ${bytes(held)}`;
    bars.append(bar);
  });
  return el("div", {}, bars, el("small", { class: "soft" }, said));
}

/** Weights resident over the decode, and what was moved. */
function offloaded(trace) {
  const moved = trace.transfers;
  if (!moved) return null;
  const out = [el("h4", {}, "Offload")];
  if (moved.resident.length) {
    const top = Math.max(...moved.resident, 1);
    const drawing = areas([["weights", moved.resident]], moved.resident.length, top * 1.06);
    const picture = el("div", { class: "areas low" }, drawing, ...rulers(top * 1.06, 3));
    picture.querySelector("title").textContent =
      `Weights resident over the decode: ${bytes(Math.min(...moved.resident))} to ${bytes(top)}`;
    out.push(el("p", { class: "label" }, "Weights resident over the decode"), el("div", { class: "axis" }, picture));
  }
  out.push(facts([["brought in", `${bytes(moved.bytes_in)} in ${plural(moved.onloads, "transfer")}`],
    ["sent away", `${bytes(moved.bytes_out)} in ${plural(moved.offloads, "transfer")}`],
    ["spent on it", span(moved.seconds)]]));
  return el("div", {}, ...out);
}

/** Where memory ran out, and the plan that fits. */
function exhausted(found, row) {
  const asked = found.requested_bytes === undefined ? "" : `: ${bytes(found.requested_bytes)} asked for`;
  const alive = found.alive_bytes === undefined ? "" : ` with ${bytes(found.alive_bytes)} alive, weights included`;
  const limit = found.limit_bytes === undefined ? "no limit but the machine's"
    : `limit ${bytes(found.limit_bytes)} beyond the loaded model`;
  const place = `${found.stage}${found.module ? ` (${found.module})` : ""}`;
  const other = found.fits && (byId.get(found.fits) ?? page.cases.find((one) => one.plan === found.fits &&
    one.axes.model === row.axes.model && one.axes.latents === row.axes.latents));
  const needs = found.fits_bytes === undefined ? "" : `, which needs ${bytes(found.fits_bytes)} as predicted`;
  const fits = found.fits
    ? el("p", {}, "The nearest plan that fits: ",
      other ? el("a", { href: linkTo(other.id) }, other.words) : found.fits, needs, ".")
    : el("p", {}, `No plan of the suite is known to fit: ${found.reason ?? "none was looked for"}.`);
  const box = el("div", { class: "alarm" },
    el("p", {}, el("b", {}, `Memory ran out in ${place}`), `${asked}${alive}, ${limit}.`), fits,
    el("p", { class: "soft" }, found.message));
  if (found.fits && found.reason) box.append(el("p", { class: "soft" }, found.reason));
  if (found.held.length) box.append(heldTable(found.held, "Alive when it ran out"));
  return box;
}
