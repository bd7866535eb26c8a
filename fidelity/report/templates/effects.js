// What each option does by itself, and which pairs do something together: means and ranges as the run stored them.
const MOST_INTERACTIONS = 12;
const EXPLAINED = "A point is the mean over all pairs of judged cases that differ in this one setting, a bar their "
  + "range. An interaction is what two settings do beyond the sum of both, over all complete quadruples. "
  + "Emulated fp16 takes no part in bytes.";
const effectPlot = { model: null, measurement: "rmse", charts: [] };
/** What rounds to nothing has no sign. */
const signed = (name, value) => {
  const said = figure(name, Math.abs(value));
  return `${said === figure(name, 0) ? "" : value < 0 ? "−" : "+"}${said}`;
};
const named = (axis, value) => (value === "on" ? axis : `${axis} ${value}`);
const reach = (row) => Math.max(Math.abs(row.least), Math.abs(row.most));
const pairName = (row) => row.axes.map((axis, place) => named(axis, row.values[place])).join(" × ");

/** Stored effects as a table: what, mean, the range over its pairs, and how many there are. */
function effectTable(heading, counted, rows) {
  const cells = ({ measurement, mean, least, most, n }) =>
    [signed(measurement, mean), `${signed(measurement, least)} … ${signed(measurement, most)}`, String(n)];
  return grid([heading, "#mean", "#least … most", `#${counted}`], rows.map(([label, row]) => [label, ...cells(row)]));
}

/** The range of each effect as a bar, and its mean as a point. */
function effectChart(canvas, rows, measurement) {
  const labels = rows.map(([label]) => label);
  const ticks = { color: colour("soft"), maxRotation: 0, autoSkipPadding: 14 };
  const grid = { color: (at) => colour(at.tick?.value === 0 ? "soft" : "line") };
  return new Chart(canvas, {
    data: { labels, datasets: [
      { type: "scatter", data: rows.map(([label, row]) => ({ x: row.mean, y: label })), pointRadius: 5, clip: false,
        pointBackgroundColor: colour("accent"), borderColor: colour("accent"), order: 0 },
      { type: "bar", data: rows.map(([, row]) => [row.least, row.most]), minBarLength: 3, barThickness: 8,
        backgroundColor: `${colour("accent")}55`, order: 1 },
    ] },
    options: { indexAxis: "y", animation: false, maintainAspectRatio: false,
      plugins: { legend: { display: false }, tooltip: {
        displayColors: false, filter: (item) => item.dataset.type === "scatter",
        callbacks: { title: (items) => items[0]?.raw.y ?? "", label: (item) => told(rows[item.dataIndex][1]) },
      } },
      scales: {
        x: { ticks: { ...ticks, callback: (value) => axisWords(measurement, value) }, grid },
        y: { type: "category", labels, offset: true, grid: { display: false },
          ticks: { ...ticks, autoSkip: false, callback: (place) => inTwo(labels[place]) } },
      } },
  });
}

/** A pair on two lines where there is no room for one. */
function inTwo(label) {
  const [first, second] = label.split(" × ");
  return second && innerWidth < 720 ? [first, `× ${second}`] : label;
}

function told({ measurement, mean, least, most, n }) {
  return `mean ${signed(measurement, mean)}, ${signed(measurement, least)} to ${signed(measurement, most)} over ${n}`;
}

function axisWords(name, value) {
  if (name !== "allocated_peak_bytes") return String(Number(value.toPrecision(3)));
  return signed(name, value).replace(/\.0+(?=\u00a0)/, "");
}

function effectPart(heading, counted, rows, measurement) {
  const canvas = el("canvas", { role: "img", "aria-label": `${heading}; the table below it holds the same figures` });
  const holder = el("div", { class: "effectchart" }, canvas);
  const lines = rows.some(([label]) => Array.isArray(inTwo(label))) ? 36 : 26;
  holder.style.height = `${44 + lines * rows.length}px`;
  const part = el("div", {}, el("h3", {}, heading), holder,
    el("details", {}, el("summary", {}, "The same as a table"), effectTable("", counted, rows)));
  return [part, () => effectPlot.charts.push(effectChart(canvas, rows, measurement))];
}

function drawEffects() {
  const box = $("effects");
  const stored = page.attribution;
  effectPlot.charts.forEach((chart) => chart.destroy());
  effectPlot.charts = [];
  if (!stored || !stored.effects.length) {
    const none = stored ? "No two judged cases differ in one setting alone." : "No attribution was stored: run again.";
    box.replaceChildren(el("p", { class: "note" }, none));
    return;
  }
  const models = [...new Set(stored.effects.map((row) => row.model))];
  if (!models.includes(effectPlot.model)) [effectPlot.model] = models;
  const ofModel = stored.effects.filter((row) => row.model === effectPlot.model);
  const names = [...new Set(ofModel.map((row) => row.measurement))];
  if (!names.includes(effectPlot.measurement)) [effectPlot.measurement] = names;
  const set = (key) => (value) => { effectPlot[key] = value; drawEffects(); };
  const controls = el("div", { class: "controls" },
    choice("Model", models.map((name) => [name, name]), effectPlot.model, set("model")),
    choice("Effect on", names.map((name) => [name, title(name)]), effectPlot.measurement, set("measurement")));
  const mine = (row) => row.model === effectPlot.model && row.measurement === effectPlot.measurement;
  const pairs = stored.interactions.filter((row) => mine(row) && reach(row) > 0).sort((a, b) => reach(b) - reach(a));
  const parts = effectParts(stored.effects.filter(mine), pairs.slice(0, MOST_INTERACTIONS));
  const rest = pairs.length - MOST_INTERACTIONS;
  box.replaceChildren(controls, el("div", { class: "effects" }, ...parts.map(([part]) => part)),
    el("p", { class: "note" }, EXPLAINED, rest > 0 ? ` ${rest} smaller interactions are in results.json.` : ""));
  if (typeof Chart !== "undefined") parts.forEach(([, make]) => make());
}

function effectParts(effects, pairs) {
  const { measurement, unit: inUnit } = effects[0];
  const words = [title(measurement), inUnit].filter(Boolean).join(", ");
  const single = effects.map((row) => [named(row.axis, row.value), row]);
  const alone = effectPart(`By itself: ${words}`, "pairs", single, measurement);
  if (!pairs.length) {
    return [alone, [el("p", { class: "note" }, "No two settings do anything beyond the sum of both."), () => {}]];
  }
  const rows = pairs.map((row) => [pairName(row), row]);
  return [alone, effectPart(`Two together, beyond the sum of both: ${words}`, "n", rows, measurement)];
}
