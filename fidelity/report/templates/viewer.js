// Golden, candidate and their difference in step: zoom, pan, blink, onion skin, tile grid, the worst place.
const decoded = new Map();

/** An ImageBitmap-like canvas of an embedded picture, decoded once. */
function picture(ref) {
  if (!ref) return Promise.reject(new Error("no picture was stored"));
  if (ref.missing) return Promise.reject(new Error(ref.missing));
  if (!decoded.has(ref.digest)) {
    if (decoded.size > 24) decoded.delete(decoded.keys().next().value);
    decoded.set(ref.digest, new Promise((resolve, reject) => {
      const image = new Image();
      image.onload = () => {
        const canvas = el("canvas", { width: image.naturalWidth, height: image.naturalHeight });
        canvas.getContext("2d", { willReadFrequently: true }).drawImage(image, 0, 0);
        resolve(canvas);
      };
      image.onerror = () => reject(new Error("the embedded picture is damaged"));
      image.src = `data:image/webp;base64,${$(`png-${ref.digest}`).textContent}`;
    }));
  }
  return decoded.get(ref.digest);
}

const pixels = (canvas) => canvas.getContext("2d", { willReadFrequently: true }).getImageData(0, 0, canvas.width, canvas.height);

/** candidate − golden, amplified, around middle grey: no difference is (128, 128, 128). */
function difference(candidate, golden, gain) {
  const [a, b] = [pixels(candidate), pixels(golden)];
  const out = new ImageData(a.width, a.height);
  for (let at = 0; at < a.data.length; at += 4) {
    for (let c = 0; c < 3; c += 1) out.data[at + c] = 128 + gain * (a.data[at + c] - b.data[at + c]);
    out.data[at + 3] = 255;
  }
  return out;
}

class Viewer {
  constructor(detail) {
    this.detail = detail;
    this.image = worstPlace(detail)?.image ?? detail.measurements.rmse?.where?.image ?? 0;
    this.mode = "side"; this.gain = 8; this.zoom = 1; this.x = null; this.y = null;
    this.grid = false; this.mix = 50; this.phase = false; this.ring = null; this.stages = [];
    this.root = el("section", { class: "viewer", "aria-label": "Pictures" });
    this.tools = el("div", { class: "tools" });
    this.panes = el("div", { class: "panes" });
    this.extra = el("details", { on: { toggle: () => this.profile() } }, el("summary", {}, "Profiles of the difference, by column and by row"), el("div", { class: "profiles" }));
    this.root.append(this.tools, this.panes, this.extra);
    this.resize = new ResizeObserver(() => this.place());
    this.resize.observe(this.panes);
  }

  count() { return Math.max(0, ...Object.values(this.detail.images).map((list) => list.length)); }

  async show() {
    const turn = (this.turn = (this.turn || 0) + 1);
    if (this.image >= this.count()) this.image = 0;
    const names = ["golden", "candidate", ...(this.detail.images.difference ? ["difference"] : [])];
    const loaded = {};
    await Promise.all(names.map(async (name) => {
      try { loaded[name] = await picture((this.detail.images[name] || [])[this.image]); } catch (error) { loaded[name] = error; }
    }));
    if (turn !== this.turn) return; // another picture was asked for meanwhile
    this.loaded = loaded;
    const whole = loaded.golden instanceof HTMLCanvasElement && loaded.candidate instanceof HTMLCanvasElement;
    this.able = whole && loaded.golden.width === loaded.candidate.width && loaded.golden.height === loaded.candidate.height;
    if (!this.able) this.mode = "side";
    this.draw();
  }

  draw() {
    clearInterval(this.timer);
    this.drawTools();
    this.stages = [];
    const pane = (name, source) => this.pane(name, source);
    const { golden, candidate, difference: stored } = this.loaded;
    let list;
    if (this.mode === "side") {
      list = [pane("golden", golden), pane("candidate", candidate)];
      if (this.able) list.push(pane(`candidate − golden, ×${this.gain}`, this.subtract()));
      else if (stored) list.push(pane("difference, as stored", stored));
    } else if (this.mode === "difference") list = [pane(`candidate − golden, ×${this.gain}`, this.subtract())];
    else list = [pane(this.mode === "blink" ? "golden" : "golden under candidate", golden)];
    this.panes.className = `panes${list.length === 1 ? " one" : ""}`;
    this.panes.style.setProperty("--n", list.length);
    this.panes.replaceChildren(...list);
    if (this.mode === "onion") this.onion();
    if (this.mode === "blink") this.blink();
    this.place();
    this.profile();
  }

  subtract() {
    const canvas = el("canvas", { width: this.loaded.golden.width, height: this.loaded.golden.height });
    canvas.getContext("2d").putImageData(difference(this.loaded.candidate, this.loaded.golden, this.gain), 0, 0);
    return canvas;
  }

  pane(name, source) {
    const caption = el("figcaption", {}, name);
    if (!(source instanceof HTMLCanvasElement)) return el("figure", {}, caption, el("div", { class: "missing" }, source.message));
    const canvas = el("canvas", { width: source.width, height: source.height, role: "img", "aria-label": name });
    canvas.getContext("2d").drawImage(source, 0, 0);
    const overlay = this.overlay(source.width, source.height);
    const stage = el("div", { class: "stage" }, canvas, overlay);
    stage.style.aspectRatio = `${source.width} / ${source.height}`;
    this.drag(stage, source);
    this.stages.push({ stage, canvas, overlay, caption, width: source.width, height: source.height });
    return el("figure", {}, caption, stage);
  }

  overlay(width, height) {
    const layer = svg("svg", { "aria-hidden": "true" });
    const grid = this.detail.receipts.tiling?.grid;
    if (grid && this.grid) {
      for (const start of grid.cols.starts.slice(1)) {
        if (grid.cols.band) layer.append(svg("rect", { class: "band", x: start, y: 0, width: grid.cols.band, height }));
        layer.append(svg("line", { x1: start, x2: start, y1: 0, y2: height }));
      }
      for (const start of grid.rows.starts.slice(1)) {
        if (grid.rows.band) layer.append(svg("rect", { class: "band", x: 0, y: start, width, height: grid.rows.band }));
        layer.append(svg("line", { y1: start, y2: start, x1: 0, x2: width }));
      }
    }
    if (this.ring && this.ring.image === this.image) {
      for (const kind of ["halo", "ring"]) layer.append(svg("circle", { class: kind, cx: this.ring.x + 0.5, cy: this.ring.y + 0.5, r: Math.max(4, width / 40 / Math.sqrt(this.zoom)) }));
    }
    return layer;
  }

  place() {
    for (const { stage, canvas, overlay, width, height } of this.stages) {
      const scale = (stage.clientWidth / width) * this.zoom;
      const half = [width / this.zoom / 2, height / this.zoom / 2];
      const x = Math.min(width - half[0], Math.max(half[0], this.x ?? width / 2));
      const y = Math.min(height - half[1], Math.max(half[1], this.y ?? height / 2));
      [this.x, this.y] = [x, y];
      const move = `translate(${(half[0] - x) * scale}px, ${(half[1] - y) * scale}px) scale(${scale})`;
      canvas.style.transform = move;
      // The view box, not a transform, so that lines keep their width at any zoom.
      overlay.setAttribute("viewBox", `${x - half[0]} ${y - half[1]} ${2 * half[0]} ${2 * half[1]}`);
      stage.classList.toggle("zoomed", this.zoom > 1);
    }
  }

  drag(stage, source) {
    let from = null;
    stage.addEventListener("pointerdown", (event) => {
      if (this.zoom > 1) { from = [event.clientX, event.clientY, this.x, this.y]; stage.setPointerCapture(event.pointerId); }
    });
    stage.addEventListener("pointermove", (event) => {
      if (!from) return;
      const scale = (stage.clientWidth / source.width) * this.zoom;
      this.x = from[2] - (event.clientX - from[0]) / scale;
      this.y = from[3] - (event.clientY - from[1]) / scale;
      this.place();
    });
    for (const event of ["pointerup", "pointercancel"]) stage.addEventListener(event, () => { from = null; });
    stage.addEventListener("dblclick", () => this.scale(this.zoom < 8 ? 2 : 1 / this.zoom));
    stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.scale(event.deltaY < 0 ? 1.25 : 0.8);
    }, { passive: false });
  }

  scale(times) {
    this.zoom = Math.min(16, Math.max(1, this.zoom * times));
    this.place();
    if (this.level) this.level.textContent = `${Math.round(this.zoom * 100)} %`;
  }

  jump(where) {
    this.ring = where;
    [this.image, this.zoom, this.x, this.y] = [where.image ?? 0, 4, where.x, where.y];
    this.show();
    this.root.scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  onion() {
    const { canvas, caption } = this.stages[0];
    const pen = canvas.getContext("2d");
    pen.globalAlpha = 1;
    pen.drawImage(this.loaded.golden, 0, 0);
    pen.globalAlpha = this.mix / 100;
    pen.drawImage(this.loaded.candidate, 0, 0);
    caption.textContent = `${this.mix} % candidate over golden`;
  }

  blink() {
    const flip = () => {
      this.phase = !this.phase;
      this.stages[0].canvas.getContext("2d").drawImage(this.phase ? this.loaded.candidate : this.loaded.golden, 0, 0);
      this.stages[0].caption.textContent = this.phase ? "candidate" : "golden";
    };
    flip();
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) this.timer = setInterval(flip, 500);
    this.flip = flip;
  }

  toggleGrid() {
    if (!this.detail.receipts.tiling?.grid) return;
    this.grid = !this.grid;
    this.draw();
  }

  /** The key b: start blinking, stop it; where motion is to be reduced, each press flips once. */
  toggleBlink() {
    if (!this.able) return;
    if (this.mode === "blink" && matchMedia("(prefers-reduced-motion: reduce)").matches) { this.flip(); return; }
    this.mode = this.mode === "blink" ? "side" : "blink";
    this.draw();
  }

  drawTools() {
    const set = (...nodes) => el("span", { class: "set", role: "group" }, ...nodes);
    const button = (label, pressed, act, about = {}) => el("button", { type: "button", "aria-pressed": String(pressed), on: { click: act }, ...about }, label);
    const parts = [];
    if (this.count() > 1) parts.push(set("Image ", ...[...Array(this.count()).keys()].map((index) => button(String(index + 1), index === this.image, () => { this.image = index; this.show(); }, { "aria-label": `Image ${index + 1}` }))));
    if (this.able) {
      const modes = [["side", "Side by side"], ["difference", "Difference"], ["blink", "Blink"], ["onion", "Onion skin"]];
      parts.push(set(...modes.map(([mode, label]) => button(label, mode === this.mode, () => { this.mode = mode; this.draw(); }, { "data-mode": mode }))));
      if (this.mode === "side" || this.mode === "difference") parts.push(this.slider("Amplify", "gain", 0, 6, Math.log2(this.gain), (value) => `×${2 ** value}`, (value) => { this.gain = 2 ** value; this.refresh(); }));
      if (this.mode === "onion") parts.push(this.slider("Candidate", "mix", 0, 100, this.mix, (value) => `${value} %`, (value) => { this.mix = value; this.onion(); }));
    }
    this.level = el("output", {}, `${Math.round(this.zoom * 100)} %`);
    parts.push(set(button("−", false, () => this.scale(0.5), { "aria-label": "Zoom out" }), this.level, button("+", false, () => this.scale(2), { "aria-label": "Zoom in" }), button("Fit", false, () => { this.zoom = 1; this.x = this.y = null; this.scale(1); })));
    if (this.detail.receipts.tiling?.grid) parts.push(check("Tile grid", this.grid, (value) => { this.grid = value; this.draw(); }));
    const worst = worstPlace(this.detail);
    if (worst) parts.push(button(worst.seam ? "Worst seam" : "Worst place", false, () => this.jump(worst), { "data-act": "jump" }));
    for (const node of parts.flatMap((part) => [...(part.matches("button") ? [part] : part.querySelectorAll("button"))])) if (!node.dataset.mode && !/^Image/.test(node.getAttribute("aria-label") || "")) node.removeAttribute("aria-pressed");
    this.tools.replaceChildren(...parts);
  }

  slider(label, name, min, max, value, words, act) {
    const said = el("output", {}, words(value));
    const input = el("input", { type: "range", min, max, value, step: 1, "data-slider": name, on: { input: (event) => { const next = Number(event.target.value); said.textContent = words(next); act(next); } } });
    return el("label", { class: "check" }, label, input, said);
  }

  /** Draw the difference anew under another gain, leaving all else as it is. */
  refresh() {
    const last = this.stages[this.stages.length - 1];
    last.canvas.getContext("2d").putImageData(difference(this.loaded.candidate, this.loaded.golden, this.gain), 0, 0);
    last.caption.textContent = `candidate − golden, ×${this.gain}`;
    last.canvas.setAttribute("aria-label", last.caption.textContent);
  }

  profile() {
    this.extra.hidden = !this.able;
    (this.charts || []).forEach((chart) => chart.destroy());
    this.charts = [];
    if (this.extra.open && this.able) this.charts = drawProfiles(this.extra.lastChild, this.loaded, this.detail.receipts.tiling?.grid);
  }

  close() {
    clearInterval(this.timer);
    this.resize.disconnect();
    (this.charts || []).forEach((chart) => chart.destroy());
  }
}

/** Where the worst seam is, else the largest difference: the place that a measurement names. */
function worstPlace(detail) {
  for (const name of ["tile_seam", "tile_step", "max_abs"]) {
    const where = detail.measurements[name]?.where;
    if (where && Number.isFinite(where.x) && Number.isFinite(where.y)) return { image: where.image ?? 0, x: where.x, y: where.y, seam: name !== "max_abs" };
  }
  return null;
}
