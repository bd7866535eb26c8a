// The decision: under a memory budget the recommended plan and the one closest to the golden, as the run ranked them.
function decide(article, place) {
  const { plans, choices } = page.models[place];
  const live = article.querySelector(".live");
  if (choices.length > 1) {
    const last = choices.length - 1;
    const said = el("output");
    const update = (place) => {
      const chosen = choices[place];
      said.textContent = bytes(chosen.budget);
      for (const role of ["recommended", "closest"]) {
        pick(article.querySelector(`[data-role=${role}]`), plans[chosen[role]]);
      }
    };
    const slider = el("input", { type: "range", min: 0, max: last, value: last,
      "aria-label": `Memory budget of ${article.dataset.model}`,
      on: { input: (event) => update(Number(event.target.value)) } });
    article.querySelector(".budget").append(el("span", { class: "label" }, "Memory budget"), slider, said);
    update(last);
  }
  if (plans.some((plan) => plan.passes)) live.append(passing(plans.filter((plan) => plan.passes)));
  const lower = narrower(plans);
  if (lower) {
    const met = `${lower.passed} of ${lower.passed + lower.missing}`;
    live.append(el("p", { class: "note" }, `Lower still, but judged with fewer latents (${met}): `,
      el("a", { href: linkTo(lower.case) }, lower.words), `, ${bytes(lower.peak)} peak.`));
  }
}

function pick(card, plan) {
  card.href = linkTo(plan.case);
  card.querySelector("b").textContent = plan.words;
  card.querySelector(".figures").textContent = plan.figures;
}

/** Every plan that passes, least peak first, and what it saves. */
function passing(plans) {
  const fill = () => { if (box.childElementCount === 1) box.append(passingTable(plans)); };
  const box = el("details", { on: { toggle: fill } },
    el("summary", {}, plans.length === 1 ? "The one plan that passes, and what it saves"
      : `All ${plans.length} plans that pass, and what they save`));
  return box;
}

function passingTable(plans) {
  const sorted = [...plans].sort((a, b) => (a.peak ?? Infinity) - (b.peak ?? Infinity));
  return grid(["Plan", "#Peak", "#Saved", "#~Decode", "#RMSE", "#~Latents"], sorted.map((plan) => [
    el("span", {}, el("a", { href: linkTo(plan.case) }, plan.words), " ", emulatedTag(plan)),
    bytes(plan.peak), plan.saved === null ? "–" : `${Math.round(plan.saved * 100)} %`, span(plan.seconds),
    number(plan.rmse), `${plan.passed} of ${plan.passed + plan.missing}`]));
}

/** The plan of least peak that passed where it was judged, if it was not judged everywhere and beats all that were. */
function narrower(plans) {
  const known = plans.filter((plan) => plan.passes && !plan.emulated && plan.peak !== null);
  const least = Math.min(Infinity, ...known.filter((plan) => plan.everywhere).map((plan) => plan.peak));
  return known.filter((plan) => !plan.everywhere && plan.peak < least).sort((a, b) => a.peak - b.peak)[0];
}

function drawDecision() {
  document.querySelectorAll(".model").forEach(decide);
  document.querySelectorAll(".bar svg").forEach((part) => { part.style.flexGrow = part.dataset.grow; });
}
