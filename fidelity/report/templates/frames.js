// A video's frames: a scrubber, playing, and the error frame by frame with the starts of its chunks.
const FRAME_SECONDS = 0.125;

/** Values of each frame of one item, from the first measurement that kept them; null where none did. */
function perFrame(detail, image, frames) {
  const names = ["frame_rmse", "rmse", ...Object.keys(detail.measurements)];
  for (const name of names) {
    const kept = detail.measurements[name]?.details?.per_frame;
    if (Array.isArray(kept) && kept.length >= (image + 1) * frames) {
      return { name, unit: detail.measurements[name].unit, values: kept.slice(image * frames, (image + 1) * frames) };
    }
  }
  return null;
}

class Film {
  constructor(viewer) {
    this.viewer = viewer;
    const last = viewer.frames - 1;
    this.chunks = (viewer.detail.receipts.temporal?.grid?.starts ?? []).slice(1);
    this.said = el("output", { class: "frame" });
    this.button = el("button", { type: "button", "data-act": "play", title: "Play (p)",
      on: { click: () => this.toggle() } }, "Play");
    const move = (event) => { this.stop(); this.go(Number(event.target.value)); };
    this.input = el("input", { type: "range", min: 0, max: last, step: 1, "data-slider": "frame", "aria-label": "Frame",
      on: { input: move } });
    this.canvas = el("canvas", { role: "img", "aria-label": "Error of each frame" });
    this.caption = el("p", { class: "label" });
    const step = (by, label, name) => el("button", { type: "button", "aria-label": name, title: name,
      on: { click: () => { this.stop(); this.step(by); } } }, label);
    this.holder = el("div", { class: "profile film-profile" }, this.canvas);
    const scrub = el("div", { class: "scrub" }, this.button, step(-1, "‹", "Previous frame (←)"), this.input,
      step(1, "›", "Next frame (→)"), this.said);
    this.root = el("div", { class: "film" }, scrub, this.caption, this.holder);
  }

  go(frame) {
    this.viewer.frame = Math.min(this.viewer.frames - 1, Math.max(0, frame));
    return this.viewer.show();
  }

  step(by) { return this.go((this.viewer.frame + by + this.viewer.frames) % this.viewer.frames); }

  toggle() {
    if (this.timer) { this.stop(); return; }
    this.button.textContent = "Pause";
    const next = async () => {
      await this.step(1);
      if (this.timer) this.timer = setTimeout(next, 1000 * FRAME_SECONDS);
    };
    this.timer = setTimeout(next, 0);
  }

  stop() {
    if (!this.timer) return;
    clearTimeout(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
    this.viewer.profiles.draw();
  }

  /** Say which frame is shown, and mark it in the profile. */
  mark() {
    const { viewer } = this;
    this.input.value = viewer.frame;
    this.said.textContent = `frame ${viewer.frame} of 0–${viewer.frames - 1}`;
    if (this.drawn !== viewer.image) this.draw();
    else this.chart?.update("none");
  }

  draw() {
    const { viewer } = this;
    this.drawn = viewer.image;
    this.chart?.destroy();
    this.chart = null;
    const found = perFrame(viewer.detail, viewer.image, viewer.frames);
    this.holder.hidden = found === null || typeof Chart === "undefined";
    const chunks = this.chunks.length ? `; a dashed line where a chunk starts (${this.chunks.join(", ")})` : "";
    this.caption.textContent = found
      ? `${title(found.name)} of each frame, ${found.unit}${chunks}`
      : "No error was measured frame by frame.";
    if (this.holder.hidden) return;
    this.chart = lineChart(this.canvas, found.values.map((y, x) => ({ x, y })), {
      edges: this.chunks, at: () => this.viewer.frame, points: true, zero: true,
      pick: (x) => { this.stop(); this.go(Math.round(x)); } });
  }

  close() { this.chart?.destroy(); }
}
