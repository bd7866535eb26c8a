// Predicted against measured error by overlap, one small chart a model; the table beside it holds the same figures.
const TILE_COLOURS = ["accent", "expected", "error", "pass", "surprise"];
const outlookCharts = [];

function outlookSets(rows) {
  return [...new Set(rows.map((row) => row.tile))].flatMap((tile, place) => {
    const tint = colour(TILE_COLOURS[place % TILE_COLOURS.length]);
    const mine = rows.filter((row) => row.tile === tile && row.own);
    const points = (key) =>
      mine.filter((row) => row[key] !== null).map((row) => ({ x: row.overlap, y: row[key], row }));
    const about = { type: "line", borderColor: tint, borderWidth: 1.6, clip: false, pointRadius: 5,
      pointBorderColor: tint, pointBorderWidth: 2 };
    return [
      { ...about, label: `tile ${tile} predicted`, data: points("predicted"), borderDash: [5, 4],
        pointBackgroundColor: colour("card") },
      { ...about, label: `tile ${tile} measured`, data: points("measured"), pointBackgroundColor: tint },
    ].filter((set) => set.data.length);
  });
}

function outlookChart(canvas, rows) {
  const ink = colour("soft");
  const axis = (text) => ({ type: "linear", beginAtZero: true, title: { display: true, text, color: ink },
    ticks: { color: ink, maxTicksLimit: 7 }, grid: { color: colour("line") } });
  const overlaps = [...new Set(rows.map((row) => row.overlap))].sort((a, b) => a - b);
  const x = { ...axis("overlap, share of the tile"), min: Math.max(0, overlaps[0] - 0.05), max: overlaps.at(-1) + 0.05,
    afterBuildTicks: (scale) => { scale.ticks = overlaps.map((value) => ({ value })); } };
  x.ticks = { ...x.ticks, callback: (value) => String(Number(value.toPrecision(3))) };
  const label = (item) => `${item.dataset.label}, overlap ${item.raw.x}: ${number(item.raw.y)}`;
  return new Chart(canvas, { type: "line", data: { datasets: outlookSets(rows) },
    options: { animation: false, maintainAspectRatio: false, scales: { x, y: axis("RMSE of all items, grey levels") },
      plugins: { legend: { position: "bottom", labels: { color: colour("ink"), usePointStyle: true, boxHeight: 7 } },
        tooltip: { displayColors: false, callbacks: { title: () => "", label } } } } });
}

function drawEvidence() {
  outlookCharts.splice(0).forEach((chart) => chart.destroy());
  if (typeof Chart === "undefined") return;
  for (const box of document.querySelectorAll("[data-outlook]")) {
    const rows = page.outlooks[Number(box.dataset.outlook)].filter((row) => row.own);
    const name = "Predicted and measured RMSE by overlap; the table below holds the same figures";
    const canvas = el("canvas", { role: "img", "aria-label": name });
    const holder = el("div", { class: "effectchart" }, canvas);
    holder.style.height = "17rem";
    box.replaceChildren(holder);
    outlookCharts.push(outlookChart(canvas, rows));
  }
}
