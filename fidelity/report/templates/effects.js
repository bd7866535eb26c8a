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

/** Mean of a figure over all pairs of judged cases that differ in one setting alone: the main effect of that setting. */
function mainEffects(name) {
  const rows = judged.filter((row) => typeof row.values[name] === "number");
  const axes = [...new Set(rows.flatMap((row) => Object.keys(row.axes)))].filter((axis) => axis !== "model" && axis !== "latents");
  const found = [];
  for (const axis of axes) {
    const base = { dtype: "fp32", offload: "none" }[axis] ?? "off";
    const rest = (row) => JSON.stringify(Object.entries(row.axes).filter(([key]) => key !== axis));
    const plain = new Map(rows.filter((row) => (row.axes[axis] ?? "off") === base).map((row) => [rest(row), row]));
    const gaps = new Map();
    for (const row of rows) {
      const twin = plain.get(rest(row));
      const setting = row.axes[axis] ?? "off";
      if (setting === base || !twin) continue;
      if (!gaps.has(setting)) gaps.set(setting, []);
      gaps.get(setting).push(row.values[name] - twin.values[name]);
    }
    for (const [setting, list] of gaps) found.push({ label: setting === "on" ? axis : `${axis} ${setting}`, list, mean: list.reduce((sum, gap) => sum + gap, 0) / list.length });
  }
  return found;
}

function drawEffects() {
  const box = $("effects").querySelector(".effects");
  if (box.childElementCount) return;
  for (const name of ["rmse", "peak", "seconds"]) {
    const found = mainEffects(name);
    if (!found.length) continue;
    const lines = found.map(({ label, list, mean }) => {
      const signed = (value) => `${value < 0 ? "−" : "+"}${figure(name, Math.abs(value))}`;
      return el("tr", {}, el("td", {}, label), el("td", { class: "n" }, signed(mean)), el("td", { class: "n" }, `${signed(Math.min(...list))} … ${signed(Math.max(...list))}`), el("td", { class: "n" }, String(list.length)));
    });
    box.append(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, `${title(name)}${unit(name) ? `, ${unit(name)}` : ""}`), el("th", { class: "n" }, "mean"), el("th", { class: "n" }, "least … most"), el("th", { class: "n" }, "pairs"))), el("tbody", {}, ...lines))));
  }
  box.append(el("p", { class: "note" }, "Over all pairs of judged cases that differ in this one setting. A wide range from least to most means that it interacts with another."));
}
