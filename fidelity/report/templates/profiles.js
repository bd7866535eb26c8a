// Lines over a picture's columns, its rows, or a video's frames.
class Profiles {
  constructor(viewer) {
    this.viewer = viewer;
    this.charts = [];
    this.box = el("div", { class: "profiles" });
    this.root = el("details", { open: innerWidth > 720, on: { toggle: () => this.draw() } },
      el("summary", {}, "Profiles of the difference, by column and by row"), this.box);
  }

  draw() {
    const { viewer } = this;
    this.root.hidden = !viewer.able || typeof Chart === "undefined";
    if (!this.root.open || this.root.hidden || viewer.film?.timer) return;
    if (viewer.mode === "blink" && this.charts.length && this.of === viewer.loaded) return;
    this.close();
    this.of = viewer.loaded;
    const grid = viewer.detail.receipts.tiling?.grid;
    const { columns, rows } = means(viewer.loaded.candidate, viewer.loaded.golden);
    const parts = [["columns", columns, grid?.cols], ["rows", rows, grid?.rows]].map(([name, values, axis]) => {
      const canvas = el("canvas", { role: "img", "aria-label": `Mean difference by ${name}` });
      const holder = el("div", {}, el("p", { class: "label" }, `Mean difference by ${name}, grey levels`),
        el("div", { class: "profile" }, canvas));
      const points = Array.from(values, (y, x) => ({ x, y }));
      return [holder, () => lineChart(canvas, points, { edges: axis?.starts.slice(1) ?? [] })];
    });
    this.box.replaceChildren(...parts.map(([holder]) => holder), el("p", { class: "note" },
      `Candidate − golden, from the 8-bit pictures${grid ? "; a dashed line where a tile starts" : ""}.`));
    this.charts = parts.map(([, make]) => make());
  }

  close() {
    this.charts.forEach((chart) => chart.destroy());
    this.charts = [];
  }
}

/** The mean of candidate − golden over channels and rows for each column, and over columns for each row. */
function means(candidate, golden) {
  const [a, b] = [pixels(candidate), pixels(golden)];
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
  return { columns, rows };
}

/**
 * A line with dashed marks at `edges`. `at` gives the x of a solid mark, `pick` is told the x that is clicked, `level`
 * says a value of the y axis in words, `step` is between two of them.
 */
function lineChart(canvas, data, options = {}) {
  const { edges = [], points = false, zero = false, stepped = false } = options;
  const { at = null, pick = null, level = null, step } = options;
  const marks = { id: "marks", afterDraw(chart, _, about) {
    const { ctx, chartArea: area, scales } = chart;
    const line = (value, tint, dash) => {
      const x = scales.x.getPixelForValue(value);
      ctx.strokeStyle = tint; ctx.setLineDash(dash); ctx.lineWidth = dash.length ? 1 : 2;
      ctx.beginPath(); ctx.moveTo(x, area.top); ctx.lineTo(x, area.bottom); ctx.stroke();
    };
    ctx.save();
    about.edges.forEach((edge) => line(edge, colour("soft"), [4, 4]));
    if (at) line(at(), colour("surprise"), []);
    ctx.restore();
  } };
  const ink = { color: colour("soft"), maxTicksLimit: 6 };
  const tint = colour("accent");
  return new Chart(canvas, { type: "line", plugins: [marks],
    data: { datasets: [{ data, stepped, fill: stepped, pointRadius: points ? 3 : 0, pointHitRadius: 0, borderWidth: 1.4,
      borderColor: tint, pointBackgroundColor: tint, backgroundColor: `${tint}26` }] },
    options: { animation: false, maintainAspectRatio: false, parsing: false,
      onClick: (event, _, chart) => { if (pick) pick(chart.scales.x.getValueForPixel(event.x)); },
      plugins: { legend: { display: false }, tooltip: { enabled: false }, marks: { edges } },
      scales: {
        x: { type: "linear", min: 0, max: data.length - 1, grid: { display: false }, ticks: { ...ink, precision: 0 } },
        y: { beginAtZero: zero, grid: { color: colour("line") },
          ticks: { ...ink, stepSize: step, ...(level ? { callback: level } : {}) } },
      } } });
}
