// Profiles of one difference, and what each option does by itself over the matrix.
function drawProfiles(box, loaded, grid) {
  const [a, b] = [pixels(loaded.candidate), pixels(loaded.golden)];
  const columns = new Float64Array(a.width);
  const rows = new Float64Array(a.height);
  for (let y = 0; y < a.height; y += 1) {
    for (let x = 0; x < a.width; x += 1) {
      const at = 4 * (y * a.width + x);
      const gap = (a.data[at] + a.data[at + 1] + a.data[at + 2] - b.data[at] - b.data[at + 1] - b.data[at + 2]) / 3;
      columns[x] += gap / a.height;
      rows[y] += gap / a.width;
    }
  }
  box.replaceChildren();
  return [["columns", columns, grid?.cols], ["rows", rows, grid?.rows]].map(([name, values, axis]) => {
    const canvas = el("canvas", { role: "img", "aria-label": `Mean difference by ${name}` });
    box.append(el("div", {}, el("p", { class: "label" }, `Mean difference by ${name}, grey levels, from the 8-bit pictures`), el("div", { class: "profile" }, canvas)));
    return profileChart(canvas, values, axis);
  });
}

function profileChart(canvas, values, axis) {
  const edges = axis ? axis.starts.slice(1) : [];
  const marks = { id: "edges", afterDraw(chart) {
    const { ctx, chartArea: area, scales } = chart;
    ctx.save();
    ctx.strokeStyle = colour("soft");
    ctx.setLineDash([4, 4]);
    for (const edge of edges) {
      const x = scales.x.getPixelForValue(edge);
      ctx.beginPath(); ctx.moveTo(x, area.top); ctx.lineTo(x, area.bottom); ctx.stroke();
    }
    ctx.restore();
  } };
  const ticks = { color: colour("soft"), maxTicksLimit: 6 };
  return new Chart(canvas, { type: "line", plugins: [marks],
    data: { datasets: [{ data: Array.from(values, (y, x) => ({ x, y })), pointRadius: 0, borderWidth: 1.3, borderColor: colour("accent") }] },
    options: { animation: false, maintainAspectRatio: false, parsing: false, plugins: { legend: { display: false }, tooltip: { enabled: false } },
      scales: { x: { type: "linear", ticks, grid: { display: false }, max: values.length }, y: { ticks, grid: { color: colour("line") } } } } });
}

const MOST_INTERACTIONS = 12;
const signed = (name, value) => `${value < 0 ? "−" : "+"}${figure(name === "allocated_peak_bytes" ? "peak" : name, Math.abs(value))}`;
const named = (axis, value) => (value === "on" ? axis : `${axis} ${value}`);

/** A table of stored effects: what, mean, the range over its pairs, and how many there are. */
function effectTable(heading, counted, rows) {
  const head = el("tr", {}, el("th", {}, heading), el("th", { class: "n" }, "mean"), el("th", { class: "n" }, "least … most"), el("th", { class: "n" }, counted));
  const lines = rows.map(([label, row]) => el("tr", {}, el("td", {}, label), el("td", { class: "n" }, signed(row.measurement, row.mean)),
    el("td", { class: "n" }, `${signed(row.measurement, row.least)} … ${signed(row.measurement, row.most)}`), el("td", { class: "n" }, String(row.n))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...lines)));
}

/** The range of each setting's effect as a bar, and its mean as a point. */
function effectChart(canvas, rows) {
  const labels = rows.map(([label]) => label);
  const ticks = { color: colour("soft") };
  const grid = { color: colour("line") };
  return new Chart(canvas, {
    data: { labels, datasets: [
      { type: "scatter", data: rows.map(([label, row]) => ({ x: row.mean, y: label })), pointRadius: 5, pointBackgroundColor: colour("accent"), borderColor: colour("accent"), order: 0 },
      { type: "bar", data: rows.map(([, row]) => [row.least, row.most]), minBarLength: 3, barThickness: 8, backgroundColor: colour("line"), order: 1 },
    ] },
    options: { indexAxis: "y", animation: false, maintainAspectRatio: false, plugins: { legend: { display: false }, tooltip: { enabled: false } },
      scales: { x: { ticks, grid }, y: { type: "category", labels, offset: true, ticks, grid: { display: false } } } },
  });
}

function drawEffects() {
  const box = $("effects").querySelector(".effects");
  if (box.childElementCount) return;
  const stored = page.attribution;
  if (!stored || !stored.effects.length) {
    box.append(el("p", { class: "note" }, stored ? "No two judged cases differ in one setting alone." : "This run stored no attribution: run the suite again."));
    return;
  }
  const size = (row) => Math.max(Math.abs(row.least), Math.abs(row.most));
  for (const [model, measurement] of new Map(stored.effects.map((row) => [`${row.model} ${row.measurement}`, [row.model, row.measurement]])).values()) {
    const mine = (row) => row.model === model && row.measurement === measurement;
    const rows = stored.effects.filter(mine).map((row) => [named(row.axis, row.value), row]);
    const name = title(measurement === "allocated_peak_bytes" ? "peak" : measurement);
    const heading = `${name}${unit(measurement) ? `, ${unit(measurement)}` : ""} · ${model}`;
    const part = el("div", {}, effectTable(heading, "pairs", rows));
    if (measurement === "rmse" && typeof Chart !== "undefined") {
      const canvas = el("canvas", { role: "img", "aria-label": `What each setting does to RMSE of ${model}; the table holds the same figures` });
      const holder = el("div", { class: "effectchart" }, canvas);
      holder.style.height = `${40 + 26 * rows.length}px`;
      part.prepend(holder);
      requestAnimationFrame(() => effectChart(canvas, rows));
    }
    const pairs = stored.interactions.filter((row) => mine(row) && size(row) > 0).sort((a, b) => size(b) - size(a));
    if (pairs.length) part.append(effectTable(`Interactions in ${name}`, "n",
      pairs.slice(0, MOST_INTERACTIONS).map((row) => [row.axes.map((axis, place) => named(axis, row.values[place])).join(" × "), row])));
    if (pairs.length > MOST_INTERACTIONS) part.append(el("p", { class: "note" }, `${pairs.length - MOST_INTERACTIONS} smaller ones are in results.json.`));
    box.append(part);
  }
  box.append(el("p", { class: "note" }, "An effect is a mean over all pairs of judged cases that differ in this one setting; an interaction is what two settings do together beyond the sum of both, over all complete quadruples. Emulated fp16 takes no part in bytes."));
}
