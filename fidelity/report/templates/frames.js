// A video's frames: a scrubber, playing, and the error frame by frame with the starts of its chunks.
const FRAME_SECONDS = 0.125;

/** Each measurement that kept a value for every frame of one item, those of frames first. */
function framewise(detail, image, frames) {
  const found = Object.entries(detail.measurements).map(([name, m]) => {
    const { profile, per_frame: flat } = m.details ?? {};
    const mine = Array.isArray(flat) ? flat.slice(image * frames, (image + 1) * frames) : null;
    return { name, unit: m.unit, values: Array.isArray(profile) ? profile[image] : mine };
  });
  const rank = ({ name }) => (name === "frame_rmse" ? 0 : name.startsWith("frame_") ? 1 : name === "rmse" ? 2 : 3);
  const whole = ({ values }) => Array.isArray(values) && values.length === frames && values.some(Number.isFinite);
  return found.filter(whole).sort((a, b) => rank(a) - rank(b));
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
    this.about = el("div", { class: "about" });
    const step = (by, label, name) => el("button", { type: "button", "aria-label": name, title: name,
      on: { click: () => { this.stop(); this.step(by); } } }, label);
    this.holder = el("div", { class: "profile film-profile" }, this.canvas);
    const scrub = el("div", { class: "scrub" }, this.button, step(-1, "‹", "Previous frame (←)"), this.input,
      step(1, "›", "Next frame (→)"), this.said);
    this.root = el("div", { class: "film" }, scrub, this.about, this.holder);
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
    const found = framewise(viewer.detail, viewer.image, viewer.frames);
    const chosen = found.find(({ name }) => name === this.name) ?? found[0];
    this.holder.hidden = !chosen || typeof Chart === "undefined";
    this.about.replaceChildren(...(chosen ? this.told(found, chosen) : ["No error was measured frame by frame."]));
    if (this.holder.hidden) return;
    this.chart = lineChart(this.canvas, chosen.values.map((y, x) => ({ x, y })), {
      edges: this.chunks, at: () => this.viewer.frame, points: true, zero: true,
      pick: (x) => { this.stop(); this.go(Math.round(x)); } });
  }

  /** Which measurement is drawn, to choose from, and what the dashed lines are. */
  told(found, { name, unit: inUnit }) {
    const set = (value) => { this.name = value; this.draw(); };
    const select = choice("Frame by frame", found.map((each) => [each.name, title(each.name)]), name, set);
    const dashed = this.chunks.length ? `; a dashed line where a chunk starts (${this.chunks.join(", ")})` : "";
    return [select, el("span", { class: "label" }, `${inUnit && inUnit !== "1" ? inUnit : "no unit"}${dashed}`)];
  }

  close() { this.chart?.destroy(); }
}
