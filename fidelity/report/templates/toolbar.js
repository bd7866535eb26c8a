// The tools over the pictures, built anew for each way of looking. Images and frames count from 0, as in results.json.
const MODES = [["side", "Side by side"], ["difference", "Difference"], ["blink", "Blink"], ["onion", "Onion skin"]];

function toolbar(viewer) {
  const set = (name, ...nodes) => el("span", { class: "set", role: "group", "aria-label": name }, ...nodes);
  const button = (label, act, about = {}) => el("button", { type: "button", on: { click: act }, ...about }, label);
  const parts = [];
  if (viewer.count() > 1) {
    parts.push(set("Image", el("span", { class: "label" }, "Image"), ...[...Array(viewer.count()).keys()].map((index) =>
      button(String(index), () => viewer.choose(index),
        { "aria-label": `Image ${index}`, "aria-pressed": String(index === viewer.image) }))));
  }
  if (viewer.able) {
    parts.push(set("Compare", ...MODES.map(([mode, label]) =>
      button(label, () => viewer.set(mode), { "data-mode": mode, "aria-pressed": String(mode === viewer.mode) }))));
    if (viewer.mode === "side" || viewer.mode === "difference") {
      parts.push(slider("Amplify", "gain", 6, Math.log2(viewer.gain), (value) => `×${2 ** value}`,
        (value) => { viewer.gain = 2 ** value; viewer.paint(); }));
    }
    if (viewer.mode === "onion") {
      parts.push(slider("Candidate", "mix", 100, viewer.mix, (value) => `${value} %`,
        (value) => { viewer.mix = value; viewer.paint(); }));
    }
  }
  viewer.level = el("output", { class: "level" }, `${Math.round(viewer.zoom * 100)} %`);
  parts.push(set("Zoom", button("−", () => viewer.scale(0.5), { "aria-label": "Zoom out" }), viewer.level,
    button("+", () => viewer.scale(2), { "aria-label": "Zoom in" }), button("Fit", () => viewer.fit())));
  if (viewer.detail.receipts.tiling?.grid) {
    parts.push(check("Tile grid", viewer.grid, () => viewer.toggleGrid()));
  }
  const worst = worstPlace(viewer.detail);
  const label = worst?.seam ? "Worst seam" : "Worst place";
  if (worst) parts.push(button(label, () => viewer.jump(worst), { "data-act": "jump", title: `${label} (s)` }));
  return parts;
}

function slider(label, name, max, value, words, act) {
  const said = el("output", {}, words(value));
  const move = (event) => {
    const next = Number(event.target.value);
    said.textContent = words(next);
    act(next);
  };
  const input = el("input", { type: "range", min: 0, max, value, step: 1, "data-slider": name, on: { input: move } });
  return el("label", { class: "check" }, label, input, said);
}
