// Keys, links, theme, and the first drawing.
function route() {
  const hash = location.hash.match(/^#case=(.*)$/);
  if (!hash) { if (state.open !== null) closeCase(); return; }
  let id = hash[1];
  try { id = decodeURIComponent(hash[1]); } catch { /* not an encoded id: looked up as it stands */ }
  if (byId.has(id)) { if (state.open !== id) openCase(id); return; }
  closeCase();
  $("shown").textContent = `This report has no case ${id}`;
  $("cases").scrollIntoView();
}

function keys(event) {
  const typing = event.target.matches("input[type=search], select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  const act = state.open === null ? PAGE_KEYS[event.key] : CASE_KEYS[event.key];
  if (act) act(event);
}

const PAGE_KEYS = {
  j: () => walk(1),
  k: () => walk(-1),
  "/": (event) => { event.preventDefault(); $("search").focus(); },
  Enter: (event) => {
    const line = $("table").querySelector("tr.at");
    if (!line || event.target.matches("button, a, summary")) return;
    event.preventDefault();
    openCase(line.dataset.id);
  },
};

/** The arrows belong to a slider that has the focus: its own frames, or what else it sets. */
const frameKey = (by) => (event) => {
  if (!viewer?.film || event.target.matches("input")) return;
  event.preventDefault();
  viewer.film.stop();
  viewer.film.step(by);
};

const CASE_KEYS = {
  j: () => turn(1),
  k: () => turn(-1),
  b: () => viewer?.toggleBlink(),
  g: () => viewer?.toggleGrid(),
  s: () => { const worst = viewer && worstPlace(viewer.detail); if (worst) viewer.jump(worst); },
  p: () => viewer?.film?.toggle(),
  ArrowLeft: frameKey(-1),
  ArrowRight: frameKey(1),
};

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  drawChart();
  drawEffects();
  drawEvidence();
  drawTrend();
  recolour();
}

function start() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.classList.toggle("dark", system.matches);
  system.addEventListener("change", (event) => theme(event.matches));
  $("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
  document.querySelectorAll("button.stat").forEach((button) => button.addEventListener("click", () => {
    state.kinds = new Set([button.dataset.kind]);
    filtered();
    $("cases").scrollIntoView();
  }));
  $("all-rows").addEventListener("click", () => { state.all = true; drawTable(); });
  $("more-surprises")?.addEventListener("click", (event) => {
    document.querySelector(".surprises").classList.add("all");
    event.target.remove();
  });
  $("detail").addEventListener("close", closeCase);
  $("detail").addEventListener("click", (event) => { if (event.target === $("detail")) closeCase(); });
  window.addEventListener("hashchange", route);
  window.addEventListener("popstate", route);
  document.addEventListener("keydown", keys);
  watchRows();
  drawDecision();
  drawFilters();
  drawTable();
  chartControls();
  drawChart();
  drawEffects();
  drawEvidence();
  drawTrend();
  route();
}

start();
