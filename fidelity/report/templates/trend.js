// One measurement of one case over the runs of a history, by commit, version and environment.
const trendPlot = { name: null, case: null, chart: null };
const TREND_SHAPES = ["circle", "triangle", "rect", "rectRot", "star", "cross"];
const TREND_NAMES = { allocated_peak_bytes: "peak", decode_seconds: "seconds" };
const trendTitle = (name) => title(TREND_NAMES[name] || name);
const trendFigure = (name, value) => figure(TREND_NAMES[name] || name, value);
const trendWhen = (run) => run.recorded.slice(0, 16).replace("T", " ");
const trendCommit = (run) => (run.commit ? run.commit.replace(/^(.{7})[0-9a-f]*/, "$1") : "–");

/** How far a series moved, as a share of its level: the one that moved most is shown first where nothing drifts. */
function trendMoved(series) {
  const known = series.values.filter((value) => value !== null);
  const level = Math.max(...known.map(Math.abs), 0);
  return level ? (Math.max(...known) - Math.min(...known)) / level : 0;
}

function trendChanges() {
  return page.trend.runs.map(({ versions }, place, all) => {
    if (place === 0) return [];
    const moved = ([name, version]) => all[place - 1].versions[name] !== version;
    return Object.entries(versions).filter(moved).map(([name, version]) => `${name} ${version}`);
  });
}

function trendControls() {
  const { series, drifts } = page.trend;
  if (trendPlot.name === null) {
    const steady = series.filter((one) => one.name !== "decode_seconds");
    const first = drifts[0] || steady.sort((a, b) => trendMoved(b) - trendMoved(a))[0] || series[0];
    Object.assign(trendPlot, { name: first.name, case: first.case });
  }
  const names = [...new Set(series.map((one) => one.name))];
  const mine = series.filter((one) => one.name === trendPlot.name).map((one) => one.case);
  if (!mine.includes(trendPlot.case)) [trendPlot.case] = mine;
  const drifting = (name, id) => drifts.some((one) => one.name === name && (id === null || one.case === id));
  const mark = (said, yes) => (yes ? `${said} · drifts` : said);
  const set = (key) => (value) => { trendPlot[key] = value; drawTrend(); };
  const offered = names.map((name) => [name, mark(trendTitle(name), drifting(name, null))]);
  $("trend-controls").replaceChildren(
    choice("Measurement", offered, trendPlot.name, set("name")),
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
  $("trend-note").textContent = trendNote(shown, classes, changes);
  if (typeof Chart === "undefined") return;
  trendPlot.chart?.destroy();
  trendPlot.chart = trendChart($("trend-chart"), shown, classes, changes);
}

function trendNote(shown, classes, changes) {
  const inUnit = shown.unit && shown.unit !== "bytes" ? `, ${shown.unit}` : "";
  const said = [`${trendTitle(shown.name)}${inUnit}; ${shown.better} is better.`];
  if (shown.limit !== null) said.push(`The limit is ${trendFigure(shown.name, shown.limit)}.`);
  if (shown.floor) said.push(`Its noise floor is ${trendFigure(shown.name, shown.floor)}.`);
  if (classes.length > 1) {
    said.push("A shape for each environment class; only runs of one class and one golden are held against each other.");
  }
  if (changes.some((each) => each.length)) said.push("A dashed line: versions changed.");
  return said.join(" ");
}

function trendChart(canvas, shown, classes, changes) {
  const { runs } = page.trend;
  const labels = runs.map((run) => [trendCommit(run), run.recorded.slice(5, 10)]);
  const sets = classes.map((name, place) => {
    const tint = colour(place ? "soft" : "accent");
    return {
      label: name, spanGaps: true,
      data: shown.values.map((value, at) => (runs[at].environment === name ? value : null)), borderColor: tint,
      backgroundColor: tint, borderWidth: place ? 1 : 1.6, tension: 0,
      pointStyle: TREND_SHAPES[place % TREND_SHAPES.length], pointRadius: 4, pointHoverRadius: 6,
    };
  });
  const level = Math.max(...shown.values.filter((value) => value !== null).map(Math.abs), 0);
  const near = shown.limit !== null && Math.abs(shown.limit) <= 3 * level;
  if (near) {
    sets.push({ label: "limit", data: runs.map(() => shown.limit), borderColor: colour("surprise"), borderDash: [6, 4],
      borderWidth: 1, pointRadius: 0 });
  }
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
  const about = ([{ dataIndex: at }]) =>
    [trendWhen(runs[at]), runs[at].commit || "no commit known", runs[at].environment, ...changes[at]];
  const label = (item) => `${item.dataset.label}: ${trendFigure(shown.name, item.parsed.y)}`;
  const border = { color: colour("line") };
  return new Chart(canvas, { type: "line", data: { labels, datasets: sets }, plugins: [versions],
    options: { animation: false, maintainAspectRatio: false, interaction: { mode: "nearest", intersect: false },
      plugins: { legend: { display: classes.length > 1 || near, labels: { ...ink, usePointStyle: true } },
        tooltip: { callbacks: { title: about, label } } },
      scales: {
        x: { ticks: { ...ink, maxRotation: 0, autoSkipPadding: 12 }, grid: { display: false }, border },
        y: { ticks: { ...ink, callback: (value) => trendFigure(shown.name, value), maxTicksLimit: 7 }, grid: border,
          grace: "8%", border, ...(level === 0 && !near ? { min: 0, suggestedMax: 1 } : {}) },
      } } });
}

function trendTable(shown, changes) {
  const table = $("trend-table");
  const heads = ["run", trendTitle(shown.name), "change", "commit", "environment", "versions that changed"];
  const kindOf = (place) => (place === 1 || place === 2 ? { class: "n" } : {});
  table.tHead.replaceChildren(el("tr", {}, ...heads.map((text, place) => el("th", kindOf(place), text))));
  const { runs } = page.trend;
  let before = null;
  const rows = runs.map((run, at) => {
    const value = shown.values[at];
    const gap = value === null || before === null ? null : value - before;
    before = value ?? before;
    const moved = gap ? `${gap < 0 ? "−" : "+"}${trendFigure(shown.name, Math.abs(gap))}` : gap === 0 ? "0" : "–";
    return el("tr", {}, el("td", { class: "nowrap" }, trendWhen(run)),
      el("td", { class: "n" }, trendFigure(shown.name, value)), el("td", { class: "n" }, moved),
      el("td", { class: "id" }, trendCommit(run)), el("td", {}, run.environment),
      el("td", {}, changes[at].join(", ") || "–"));
  });
  table.tBodies[0].replaceChildren(...rows.reverse());
}
