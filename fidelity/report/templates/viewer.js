// Golden, candidate and their difference in step: four ways to compare, zoom, pan, frames, the worst place.
const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

class Viewer {
  /** `look`: mode, gain, zoom and place of the case before, as `look()` gave them. */
  constructor(detail, look = {}) {
    this.detail = detail;
    this.frames = Math.max(1, detail.frames ?? 1);
    const first = worstPlace(detail) ?? detail.measurements.rmse?.where ?? {};
    [this.image, this.frame] = [first.image ?? 0, Math.min(first.frame ?? 0, this.frames - 1)];
    this.mode = "side"; this.gain = 8; this.zoom = 1; this.x = null; this.y = null;
    this.grid = false; this.mix = 50; this.phase = false; this.ring = null; this.stages = [];
    Object.assign(this, look);
    this.grid &&= Boolean(detail.receipts.tiling?.grid);
    this.tools = el("div", { class: "tools" });
    this.panes = el("div", { class: "panes" });
    this.film = this.frames > 1 ? new Film(this) : null;
    this.profiles = new Profiles(this);
    this.root = el("section", { class: "viewer", "aria-label": "Pictures" },
      this.tools, this.panes, this.film?.root, this.profiles.root);
    this.resize = new ResizeObserver(() => this.place());
    this.resize.observe(this.panes);
  }

  /** How it is looked at, apart from what is looked at. */
  look() {
    const { mode, gain, zoom, x, y, grid, mix } = this;
    return { mode, gain, zoom, x, y, grid, mix };
  }

  count() {
    return Math.ceil(Math.max(0, ...Object.values(this.detail.images).map((list) => list.length)) / this.frames);
  }

  /** Load this image and frame, then draw it: into the panes that stand, if they fit it. */
  async show() {
    const turn = (this.turn = (this.turn || 0) + 1);
    if (this.image >= this.count()) this.image = 0;
    const place = this.image * this.frames + this.frame;
    const names = ["golden", "candidate", ...(this.detail.images.difference ? ["difference"] : [])];
    const loaded = {};
    await Promise.all(names.map(async (name) => {
      loaded[name] = await picture(this.detail.images[name]?.[place]).catch((error) => error);
    }));
    if (turn !== this.turn) return; // another picture was asked for meanwhile
    this.loaded = loaded;
    const { golden, candidate } = loaded;
    const shapeOf = (one) => (isPicture(one) ? `${one.width}×${one.height}` : one.message);
    this.able = isPicture(golden) && isPicture(candidate) && shapeOf(golden) === shapeOf(candidate);
    if (!this.able) this.mode = "side";
    const shape = Object.values(loaded).map(shapeOf).join();
    if (shape !== this.shape) this.draw();
    else this.paint();
    this.shape = shape;
  }

  /** Build tools and panes for the mode, then paint. */
  draw() {
    clearInterval(this.timer);
    this.stages = [];
    const { golden, candidate, difference: stored } = this.loaded;
    const gap = `candidate − golden, ×${this.gain}`;
    let list;
    if (this.mode === "side") {
      list = [this.pane("golden", "golden", golden), this.pane("candidate", "candidate", candidate)];
      if (this.able) list.push(this.pane("gap", gap, golden));
      else if (stored) list.push(this.pane("difference", "difference ×8, as stored", stored));
    } else list = [this.pane(this.mode === "difference" ? "gap" : this.mode, gap, golden)];
    this.panes.className = `panes${list.length === 1 ? " one" : ""}`;
    this.panes.style.setProperty("--n", list.length);
    this.panes.replaceChildren(...list);
    this.tools.replaceChildren(...toolbar(this));
    this.place();
    this.paint();
    if (this.mode === "blink" && !reducedMotion()) this.timer = setInterval(() => this.flip(), 500);
  }

  pane(kind, name, source) {
    const caption = el("figcaption", {}, name);
    if (!isPicture(source)) return el("figure", {}, caption, el("div", { class: "missing" }, source.message));
    const { width, height } = source;
    const canvas = el("canvas", { width, height, role: "img", "aria-label": name });
    const layer = svg("svg", { "aria-hidden": "true" });
    const stage = el("div", { class: "stage" }, canvas, layer);
    stage.style.aspectRatio = `${width} / ${height}`;
    drag(this, stage, width);
    this.stages.push({ kind, stage, canvas, layer, caption, width, height });
    return el("figure", {}, caption, stage);
  }

  /** Put the loaded pictures on the canvases. */
  paint() {
    for (const { kind, canvas, caption, layer, width, height } of this.stages) {
      const pen = canvas.getContext("2d");
      pen.globalAlpha = 1;
      if (kind === "gap") {
        pen.putImageData(difference(this.loaded.candidate, this.loaded.golden, this.gain), 0, 0);
        caption.textContent = `candidate − golden, ×${this.gain}`;
      } else if (kind === "onion") {
        pen.drawImage(this.loaded.golden, 0, 0);
        pen.globalAlpha = this.mix / 100;
        pen.drawImage(this.loaded.candidate, 0, 0);
        caption.textContent = `${this.mix} % candidate over golden`;
      } else if (kind === "blink") {
        caption.textContent = this.phase ? "candidate" : "golden";
        pen.drawImage(this.loaded[caption.textContent], 0, 0);
      } else pen.drawImage(this.loaded[kind], 0, 0);
      canvas.setAttribute("aria-label", caption.textContent);
      layer.replaceChildren(...overlay(this, width, height));
    }
    this.film?.mark();
    this.profiles.draw();
  }

  /** Move all panes to the same place at the same scale. */
  place() {
    for (const { stage, canvas, layer, width, height } of this.stages) {
      const scale = (stage.clientWidth / width) * this.zoom;
      const half = [width / this.zoom / 2, height / this.zoom / 2];
      const x = Math.min(width - half[0], Math.max(half[0], this.x ?? width / 2));
      const y = Math.min(height - half[1], Math.max(half[1], this.y ?? height / 2));
      [this.x, this.y] = [x, y];
      canvas.style.transform = `translate(${(half[0] - x) * scale}px, ${(half[1] - y) * scale}px) scale(${scale})`;
      // The view box, not a transform, so that lines keep their width at any zoom.
      layer.setAttribute("viewBox", `${x - half[0]} ${y - half[1]} ${2 * half[0]} ${2 * half[1]}`);
      stage.classList.toggle("zoomed", this.zoom > 1);
    }
  }

  scale(times) {
    this.zoom = Math.min(16, Math.max(1, this.zoom * times));
    this.place();
    if (this.level) this.level.textContent = `${Math.round(this.zoom * 100)} %`;
  }

  fit() {
    [this.zoom, this.x, this.y, this.ring] = [1, null, null, null];
    this.draw();
  }

  jump(where) {
    this.film?.stop();
    [this.ring, this.zoom, this.x, this.y] = [where, 4, where.x, where.y];
    [this.image, this.frame] = [where.image ?? 0, Math.min(where.frame ?? this.frame, this.frames - 1)];
    this.shape = null;
    this.show();
    this.root.scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  choose(image) {
    [this.image, this.shape] = [image, null];
    this.show();
  }

  set(mode) {
    if (!this.able) return;
    this.mode = mode;
    this.draw();
  }

  flip() {
    this.phase = !this.phase;
    this.paint();
  }

  /** The key b: start blinking, stop it; where motion is to be reduced, each press flips once. */
  toggleBlink() {
    if (this.mode === "blink" && reducedMotion()) this.flip();
    else this.set(this.mode === "blink" ? "side" : "blink");
  }

  toggleGrid() {
    if (!this.detail.receipts.tiling?.grid) return;
    this.grid = !this.grid;
    this.draw();
  }

  close() {
    this.turn += 1; // what is still being decoded has no place to go
    clearInterval(this.timer);
    this.film?.stop();
    this.film?.close();
    this.resize.disconnect();
    this.profiles.close();
  }
}
