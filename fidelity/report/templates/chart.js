// Memory against fidelity: a scatter of one model's cases on one set of latents, with the Pareto front.
const SHAPES = { pass: "circle", expected: "triangle", surprise: "rectRot", error: "crossRot" };
const plot = { model: null, latents: null, x: "peak", y: "rmse", logX: false, logY: true, chart: null, points: [] };

function chartControls() {
  const models = (page.axes.model ?? []).filter((model) => judged.some((row) => row.axes.model === model));
  if (!plot.model || !models.includes(plot.model)) plot.model = models[0] ?? null;
  const latents = (page.axes.latents ?? []).filter((name) =>
    judged.some((row) => row.axes.model === plot.model && row.axes.latents === name));
  if (!latents.includes(plot.latents)) plot.latents = page.yardsticks[plot.model] ?? latents[0] ?? null;
  const axes = ["peak", "seconds", ...page.main, ...measured].filter((name, place, all) =>
    all.indexOf(name) === place && judged.some((row) => typeof row.values[name] === "number"));
  if (!axes.includes(plot.x)) plot.x = axes[0] ?? "peak";
  if (!axes.includes(plot.y)) plot.y = axes.find((name) => name !== plot.x) ?? plot.x;
  const set = (key) => (value) => { plot[key] = value; chartControls(); drawChart(); };
  const pairs = (names) => names.map((name) => [name, name]);
  const axisPairs = axes.map((name) => [name, title(name)]);
  $("chart-controls").replaceChildren(
    choice("Model", pairs(models), plot.model, set("model")),
    choice("Latents", pairs(latents), plot.latents, set("latents")),
    choice("Across", axisPairs, plot.x, set("x")), choice("Up", axisPairs, plot.y, set("y")),
    check("log across", plot.logX, set("logX")), check("log up", plot.logY, set("logY")));
}

const better = (name) => (judged.some((row) => row.higher.includes(name)) ? -1 : 1);

/** Points that no other beats on both axes; only passing cases that were not emulated may stand there. */
function front(points) {
  const [sx, sy] = [better(plot.x), better(plot.y)];
  const able = points.filter((point) => point.row.kind === "pass" && !point.row.emulated);
  const gap = (a, b, name) => a.row.values[name] - b.row.values[name];
  able.sort((a, b) => sx * gap(a, b, plot.x) || sy * gap(a, b, plot.y));
  const kept = [];
  let best = Infinity;
  for (const point of able) {
    const value = sy * point.row.values[plot.y];
    if (value < best) { kept.push(point); best = value; }
  }
  return kept;
}

/** On a logarithmic axis zero has no place: it is drawn below the least figure, and the note says so. */
function floorOf(rows, name, log) {
  const positive = rows.map((row) => row.values[name]).filter((value) => value > 0);
  return log ? (positive.length ? Math.min(...positive) / 3 : 1) : null;
}

function scale(name, log, floor, all) {
  const ink = colour("soft");
  const tick = (value) => {
    if (log && value <= floor * 1.0001) return all.some((row) => row.values[name] === 0) ? "0" : figure(name, value);
    if (name === "peak") return bytes(value).replace(/\.0+(?=\u00a0)/, "");
    return String(Number(value.toPrecision(3)));
  };
  // Bytes read well in steps of a power of two, which a decimal axis does not take by itself.
  const most = Math.max(...all.map((row) => row.values[name]), 1);
  const step = name === "peak" && !log ? 2 ** Math.ceil(Math.log2(most / 6)) : undefined;
  const words = [title(name), unit(name) && unit(name) !== "1" ? `(${unit(name)})` : ""].filter(Boolean).join(" ");
  return {
    type: log ? "logarithmic" : "linear", min: log ? floor : undefined,
    beginAtZero: name !== "ssim" && name !== "psnr", grace: log || step ? undefined : "4%",
    max: step ? Math.ceil((most * 1.02) / step) * step : undefined,
    title: { display: true, text: words, color: ink },
    ticks: { color: ink, callback: tick, stepSize: step, maxTicksLimit: 8, autoSkipPadding: 18, maxRotation: 0 },
    grid: { color: colour("line") }, border: { color: colour("line") },
  };
}

/** Those of the shown model and latents that a golden judged, and of them those with a figure on both axes. */
function plotted() {
  const here = judged.filter((row) =>
    row.axes.model === plot.model && row.axes.latents === plot.latents && !row.check);
  const has = (row, name) => typeof row.values[name] === "number";
  return { here, rows: here.filter((row) => has(row, plot.x) && has(row, plot.y)) };
}

function drawChart() {
  if (typeof Chart === "undefined" || !plot.model) { $("tradeoff").hidden = true; return; }
  const { here, rows } = plotted();
  const floors = { x: floorOf(rows, plot.x, plot.logX), y: floorOf(rows, plot.y, plot.logY) };
  const at = (value, floor) => (floor === null ? value : Math.max(value, floor));
  plot.points = rows.map((row) => ({ row, x: at(row.values[plot.x], floors.x), y: at(row.values[plot.y], floors.y) }));
  const caseOf = (hits) => (hits.length ? hits[0].element.$context.raw.row.id : null);
  if (plot.chart) plot.chart.destroy();
  plot.chart = new Chart($("chart"), {
    type: "scatter", data: { datasets: chartSets() },
    options: {
      animation: false, maintainAspectRatio: false, interaction: { mode: "nearest", intersect: true },
      onClick: (_, hits) => { if (hits.length) openCase(caseOf(hits)); },
      onHover: (event, hits) => {
        event.native.target.style.cursor = hits.length ? "pointer" : "default";
        pointTo(caseOf(hits));
      },
      scales: { x: scale(plot.x, plot.logX, floors.x, rows), y: scale(plot.y, plot.logY, floors.y, rows) },
      plugins: {
        legend: { position: "bottom", labels: { usePointStyle: true, color: colour("ink"), boxHeight: 8 } },
        tooltip: {
          filter: (item) => item.dataset.type !== "line", displayColors: false,
          callbacks: { label: (item) => tipOf(item.raw.row) },
        },
      },
    },
  });
  chartNote(here, rows, floors);
}

/** One set a kind of ending, in its shape and colour, what the filters leave out faded; then the Pareto front. */
function chartSets() {
  const kept = new Set(visible().map((row) => row.id));
  const sets = Object.entries(SHAPES).map(([kind, shape]) => {
    const data = plot.points.filter((point) => point.row.kind === kind);
    const tint = kindColour(kind);
    const shade = (point) => (kept.has(point.row.id) ? tint : `${tint}38`);
    return {
      label: page.kinds[kind].title, data, pointStyle: shape, order: 1, clip: false, pointBorderWidth: 2,
      pointRadius: shape === "circle" ? 5.5 : 7, pointHoverRadius: 10,
      pointBackgroundColor: data.map((point) => (point.row.emulated ? "transparent" : shade(point))),
      pointBorderColor: data.map(shade), backgroundColor: tint, borderColor: tint,
    };
  }).filter((set) => set.data.length);
  const best = front(plot.points);
  if (best.length > 1) {
    sets.push({ label: "Pareto front of what passed", data: best, type: "line", stepped: "before", order: 2,
      pointRadius: 0, pointHitRadius: 0, pointStyle: "line", borderColor: colour("soft"), borderWidth: 1.5,
      borderDash: [5, 4] });
  }
  return sets;
}

function tipOf(row) {
  const said = [plot.x, plot.y].map((name) => `${title(name)} ${figure(name, row.values[name])}`);
  return [`${row.words}${row.emulated ? " (emulated)" : ""}`, verdictWords(row), said.join(", ")];
}

function chartNote(here, rows, floors) {
  const said = [];
  const gone = here.filter((row) => !rows.includes(row));
  if (gone.length) {
    const emulated = gone.filter((row) => row.emulated).length;
    const which = emulated ? ` (${emulated} of them emulated, without a memory of their own)` : "";
    said.push(`${gone.length} of ${here.length} cases have no figure on one of these axes and are not drawn${which}.`);
  }
  const atZero = (name, floor) => floor !== null && rows.some((row) => row.values[name] === 0);
  if (atZero(plot.x, floors.x) || atZero(plot.y, floors.y)) {
    said.push("Exact decodes stand at 0, on the edge of the logarithmic axis.");
  }
  if (rows.some((row) => row.emulated)) said.push("Hollow: fp16 emulated, not in the Pareto front.");
  said.push("Click a point for its case.");
  $("chart-note").textContent = said.join(" ");
}

/** Link from the table to the chart: enlarge the case's point. */
function showPoint(id) {
  if (!plot.chart) return;
  const found = [];
  plot.chart.data.datasets.forEach((set, datasetIndex) => set.data.forEach((point, index) => {
    if (point.row.id === id && set.type !== "line") found.push({ datasetIndex, index });
  }));
  plot.chart.setActiveElements(found);
  plot.chart.update("none");
}
