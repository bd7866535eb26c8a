// One measurement of one case over the runs of a history, by commit, version and environment.
const trendPlot = { name: null, case: null, chart: null };
const TREND_SHAPES = ["circle", "triangle", "rect", "rectRot", "star", "cross"];
const trendTitle = (name) => ({ allocated_peak_bytes: title("peak"), decode_seconds: title("seconds") }[name] || title(name));
const trendFigure = (name, value) => figure({ allocated_peak_bytes: "peak", decode_seconds: "seconds" }[name] || name, value);
const trendWhen = (run) => run.recorded.slice(0, 16).replace("T", " ");
const trendCommit = (run) => (run.commit ? run.commit.replace(/^(.{7})[0-9a-f]*/, "$1") : "–");

/** How far a series moved, as a share of its level: the one that moved most is shown first where nothing drifts. */
function trendMoved(series) {
  const known = series.values.filter((value) => value !== null);
  const level = Math.max(...known.map(Math.abs), 0);
  return level ? (Math.max(...known) - Math.min(...known)) / level : 0;
}

function trendChanges() {
  return page.trend.runs.map((run, place, all) => (place === 0 ? [] : Object.entries(run.versions)
    .filter(([name, version]) => all[place - 1].versions[name] !== version).map(([name, version]) => `${name} ${version}`)));
}

function trendControls() {
  const { series, drifts } = page.trend;
  if (trendPlot.name === null) {
    const first = drifts[0] || series.filter((one) => one.name !== "decode_seconds").sort((a, b) => trendMoved(b) - trendMoved(a))[0] || series[0];
    Object.assign(trendPlot, { name: first.name, case: first.case });
  }
  const names = [...new Set(series.map((one) => one.name))];
  const mine = series.filter((one) => one.name === trendPlot.name).map((one) => one.case);
  if (!mine.includes(trendPlot.case)) [trendPlot.case] = mine;
  const drifting = (name, id) => drifts.some((one) => one.name === name && (id === null || one.case === id));
  const mark = (said, yes) => (yes ? `${said} · drifts` : said);
  const set = (key) => (value) => { trendPlot[key] = value; drawTrend(); };
  $("trend-controls").replaceChildren(
    choice("Measurement", names.map((name) => [name, mark(trendTitle(name), drifting(name, null))]), trendPlot.name, set("name")),
    choice("Case", mine.map((id) => [id, mark(id, drifting(trendPlot.name, id))]), trendPlot.case, set("case")));
}

function drawTrend() {
  if (!page.trend || !page.trend.series.length) return;
  trendControls();
  const { runs, series } = page.trend;
  const shown = series.find((one) => one.name === trendPlot.name && one.case === trendPlot.case);
  const changes = trendChanges();
  const classes = [...new Set([runs[runs.length - 1].environment, ...runs.map((run) => run.environment)])];
  trendTable(shown, changes);
  const limit = shown.limit === null ? "" : ` The limit is ${trendFigure(shown.name, shown.limit)}.`;
  const floor = shown.floor ? ` Its noise floor is ${trendFigure(shown.name, shown.floor)}.` : "";
  const marks = classes.length > 1 ? " A shape for each environment class; only runs of one class and one golden are held against each other." : "";
  $("trend-note").textContent = `${trendTitle(shown.name)}${shown.unit && shown.unit !== "bytes" ? `, ${shown.unit}` : ""}; ${shown.better} is better.${limit}${floor}${marks}${changes.some((each) => each.length) ? " A dashed line: versions changed." : ""}`;
  if (typeof Chart === "undefined") return;
  trendPlot.chart?.destroy();
  trendPlot.chart = trendChart($("trend-chart"), shown, classes, changes);
}

function trendChart(canvas, shown, classes, changes) {
  const { runs } = page.trend;
  const labels = runs.map((run) => [trendCommit(run), run.recorded.slice(5, 10)]);
  const sets = classes.map((name, place) => ({
    label: name, data: shown.values.map((value, at) => (runs[at].environment === name ? value : null)), spanGaps: true,
    borderColor: colour(place ? "soft" : "accent"), backgroundColor: colour(place ? "soft" : "accent"), borderWidth: place ? 1 : 1.6,
    pointStyle: TREND_SHAPES[place % TREND_SHAPES.length], pointRadius: 4, pointHoverRadius: 6, tension: 0 }));
  const level = Math.max(...shown.values.filter((value) => value !== null).map(Math.abs), 0);
  const near = shown.limit !== null && Math.abs(shown.limit) <= 3 * level;
  if (near) sets.push({ label: "limit", data: runs.map(() => shown.limit), borderColor: colour("surprise"), borderDash: [6, 4], borderWidth: 1, pointRadius: 0 });
  const versions = { id: "versions", afterDraw(chart) {
    const { ctx, chartArea: area, scales } = chart;
    ctx.save();
    ctx.strokeStyle = colour("soft");
    ctx.setLineDash([3, 4]);
    changes.forEach((each, at) => {
      if (!each.length) return;
      const x = (scales.x.getPixelForValue(at) + scales.x.getPixelForValue(at - 1)) / 2;
      ctx.beginPath(); ctx.moveTo(x, area.top); ctx.lineTo(x, area.bottom); ctx.stroke();
    });
    ctx.restore();
  } };
  const ink = { color: colour("soft") };
  const about = (items) => { const run = runs[items[0].dataIndex]; return [trendWhen(run), run.commit || "no commit known", run.environment, ...changes[items[0].dataIndex]]; };
  return new Chart(canvas, { type: "line", data: { labels, datasets: sets }, plugins: [versions],
    options: { animation: false, maintainAspectRatio: false, interaction: { mode: "nearest", intersect: false },
      plugins: { legend: { display: classes.length > 1 || near, labels: { ...ink, usePointStyle: true } },
        tooltip: { callbacks: { title: about, label: (item) => `${item.dataset.label}: ${trendFigure(shown.name, item.parsed.y)}` } } },
      scales: { x: { ticks: { ...ink, maxRotation: 0, autoSkipPadding: 12 }, grid: { display: false }, border: { color: colour("line") } },
        y: { ticks: { ...ink, callback: (value) => trendFigure(shown.name, value), maxTicksLimit: 7 }, grid: { color: colour("line") }, grace: "8%", border: { color: colour("line") } } } } });
}

function trendTable(shown, changes) {
  const table = $("trend-table");
  const heads = [["run"], [trendTitle(shown.name), "n"], ["change", "n"], ["commit"], ["environment"], ["versions that changed"]];
  table.tHead.replaceChildren(el("tr", {}, ...heads.map(([text, kind]) => el("th", kind ? { class: kind } : {}, text))));
  const { runs } = page.trend;
  let before = null;
  const rows = runs.map((run, at) => {
    const value = shown.values[at];
    const gap = value === null || before === null ? null : value - before;
    before = value ?? before;
    const moved = gap === null ? "–" : gap === 0 ? "0" : `${gap < 0 ? "−" : "+"}${trendFigure(shown.name, Math.abs(gap))}`;
    return el("tr", {}, el("td", { class: "nowrap" }, trendWhen(run)), el("td", { class: "n" }, trendFigure(shown.name, value)), el("td", { class: "n" }, moved),
      el("td", { class: "id" }, trendCommit(run)), el("td", {}, run.environment), el("td", {}, changes[at].join(", ") || "–"));
  });
  table.tBodies[0].replaceChildren(...rows.reverse());
}
