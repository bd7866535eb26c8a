// The decision: beside the plan that needs least, the fastest and the closest to the golden under a memory budget.
function decide(article) {
  const plans = page.plans[article.dataset.model] || [];
  const able = plans.filter((plan) => plan.everywhere && !plan.emulated && plan.peak !== null);
  const live = article.querySelector(".live");
  if (able.length) {
    const steps = [...new Set(able.map((plan) => plan.peak))].sort((a, b) => a - b);
    const said = el("output");
    const picks = el("div", { class: "picks" });
    const update = (place) => {
      const budget = steps[place];
      said.textContent = bytes(budget);
      const fitting = able.filter((plan) => plan.peak <= budget);
      picks.replaceChildren(
        pick("Fastest that fits", fitting, (plan) => [plan.seconds ?? Infinity, plan.peak, plan.rmse ?? Infinity]),
        pick("Closest to the golden that fits", fitting, (plan) => [plan.rmse ?? Infinity, plan.peak, plan.seconds ?? Infinity]));
    };
    const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": `Memory budget of ${article.dataset.model}`,
      on: { input: (event) => update(Number(event.target.value)) } });
    live.append(el("div", { class: "budget" }, el("label", {}, "Memory budget"), slider, said), picks);
    update(steps.length - 1);
  }
  if (plans.some((plan) => plan.passes)) live.append(passing(plans.filter((plan) => plan.passes)));
  const lower = narrower(plans, able);
  if (lower) live.append(el("p", { class: "note" }, `Lower still, but judged with fewer latents (${lower.passed.length} of ${lower.passed.length + lower.missing.length}): `,
    el("a", { href: `#case=${encodeURIComponent(lower.case)}` }, lower.words), `, ${bytes(lower.peak)} peak.`));
}

/** Every plan that passes, least peak first, and what it saves. */
function passing(plans) {
  const box = el("details", { on: { toggle: () => { if (box.childElementCount === 1) box.append(passingTable(plans)); } } }, el("summary", {}, `All ${plans.length} plans that pass, and what they save`));
  return box;
}

function passingTable(plans) {
  const lines = [...plans].sort((a, b) => (a.peak ?? Infinity) - (b.peak ?? Infinity)).map((plan) => el("tr", {},
    el("td", {}, el("a", { href: `#case=${encodeURIComponent(plan.case)}` }, plan.words), plan.emulated ? " " : "", plan.emulated ? el("em", { class: "tag" }, "emulated") : ""),
    el("td", { class: "n" }, bytes(plan.peak)), el("td", { class: "n" }, plan.saved === null ? "–" : `${Math.round(plan.saved * 100)} %`),
    el("td", { class: "n wide" }, figure("seconds", plan.seconds)), el("td", { class: "n" }, number(plan.rmse)), el("td", { class: "n wide" }, `${plan.passed.length} of ${plan.passed.length + plan.missing.length}`)));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Plan"), el("th", { class: "n" }, "Peak"), el("th", { class: "n" }, "Saved"), el("th", { class: "n wide" }, "Decode"), el("th", { class: "n" }, "RMSE"), el("th", { class: "n wide" }, "Latents"))), el("tbody", {}, ...lines)));
}

/** The plan with least peak that passed wherever it was judged, if it was not judged everywhere and beats all that were. */
function narrower(plans, able) {
  const least = Math.min(Infinity, ...able.map((plan) => plan.peak));
  return plans.filter((plan) => plan.passes && !plan.everywhere && !plan.emulated && plan.peak !== null && plan.peak < least).sort((a, b) => a.peak - b.peak)[0];
}

function pick(label, plans, keys) {
  const first = [...plans].sort((a, b) => {
    const [left, right] = [keys(a), keys(b)];
    const place = left.findIndex((value, index) => value !== right[index]);
    return place < 0 ? 0 : left[place] - right[place];
  })[0];
  const saved = first.saved === null || Math.round(first.saved * 100) === 0 ? "" : first.saved >= 0 ? `, ${Math.round(first.saved * 100)} % less than plain fp32` : `, ${Math.round(-first.saved * 100)} % more than plain fp32`;
  return el("a", { href: `#case=${encodeURIComponent(first.case)}` }, el("small", {}, label), el("b", {}, first.words),
    el("small", {}, `${bytes(first.peak)} peak${saved}; ${figure("seconds", first.seconds)}; RMSE ${number(first.rmse)}`));
}

function drawDecision() {
  document.querySelectorAll(".model").forEach(decide);
  document.querySelectorAll(".bar svg").forEach((part) => { part.style.flexGrow = part.dataset.grow; });
}
