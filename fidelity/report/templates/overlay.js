// What lies over a picture: tile borders, overlap bands, and a ring at the worst place.
function overlay(viewer, width, height) {
  const parts = [];
  const grid = viewer.detail.receipts.tiling?.grid;
  if (grid && viewer.grid) {
    for (const start of grid.cols.starts.slice(1)) {
      if (grid.cols.band) parts.push(svg("rect", { class: "band", x: start, y: 0, width: grid.cols.band, height }));
      parts.push(svg("line", { x1: start, x2: start, y1: 0, y2: height }));
    }
    for (const start of grid.rows.starts.slice(1)) {
      if (grid.rows.band) parts.push(svg("rect", { class: "band", x: 0, y: start, width, height: grid.rows.band }));
      parts.push(svg("line", { y1: start, y2: start, x1: 0, x2: width }));
    }
  }
  const { ring } = viewer;
  if (ring && (ring.image ?? 0) === viewer.image && (ring.frame ?? viewer.frame) === viewer.frame) {
    const r = Math.max(4, width / 40 / Math.sqrt(viewer.zoom));
    const round = { cx: ring.x + 0.5, cy: ring.y + 0.5, r };
    parts.push(svg("circle", { class: "halo", ...round }), svg("circle", { class: "ring", ...round }));
  }
  return parts;
}

/** Let a stage be dragged while it is enlarged; zoom with a double click, and with the wheel and Ctrl. */
function drag(viewer, stage, width) {
  let from = null;
  stage.addEventListener("pointerdown", (event) => {
    if (viewer.zoom <= 1) return;
    from = [event.clientX, event.clientY, viewer.x, viewer.y];
    stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointermove", (event) => {
    if (!from) return;
    const scale = (stage.clientWidth / width) * viewer.zoom;
    viewer.x = from[2] - (event.clientX - from[0]) / scale;
    viewer.y = from[3] - (event.clientY - from[1]) / scale;
    viewer.place();
  });
  for (const event of ["pointerup", "pointercancel"]) stage.addEventListener(event, () => { from = null; });
  stage.addEventListener("dblclick", () => viewer.scale(viewer.zoom < 8 ? 2 : 1 / viewer.zoom));
  stage.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    viewer.scale(event.deltaY < 0 ? 1.25 : 0.8);
  }, { passive: false });
}
