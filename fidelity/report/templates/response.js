// What a server does with the sample: each step's copies, its rise, what it leaves, and the files that it may send.
function afterDecode(trace) {
  if (trace.after === undefined) return null;
  const { steps, why } = page.after[trace.after];
  const weights = trace.weights_bytes ?? 0;
  const total = (step) => step.copies + (step.rise ?? 0);
  const most = Math.max(...steps.map(total), 1);
  const share = (count) => `${(100 * count) / most}%`;
  const rows = steps.map((step) => {
    const bar = el("span", { class: "found", "aria-hidden": "true" },
      el("i", { class: "m-output" }), el("i", { class: "m-copies" }));
    [bar.children[0].style.width, bar.children[1].style.width] = [share(step.copies), share(step.rise ?? 0)];
    const times = step.calls > 1 ? ` ×${step.calls}` : "";
    const counted = step.by ? `as counted by ${step.by}` : step.reason ?? "";
    return [el("span", { title: step.held.join(", ") }, step.part + times), bar, bytes(step.copies),
      el("span", { title: counted }, bytes(step.rise)), bytes(step.leaves),
      step.seconds === undefined ? "–" : `${number(1000 * step.seconds)}\u00a0ms`];
  });
  return el("div", { class: "after" }, el("h4", {}, "After the decode"),
    grid(["step", "", "#~finds", "#rises by", "#leaves", "#~takes"], rows, { class: "steps" }),
    el("p", { class: "note" }, "A bar's first part: copies of the sample that a step finds; its second: by how much " +
      `it rises over them at most. ${bytes(weights)} of weights stay beside. A server sends one kind of file.`),
    el("details", {}, el("summary", {}, "How it was counted"),
      el("ul", { class: "plainlist" }, ...why.map((reason) => el("li", {}, reason)))));
}
