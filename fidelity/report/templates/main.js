// Keys, links, theme, and the first drawing.
function route() {
  const found = location.hash.match(/^#case=(.*)$/);
  if (!found) { if (state.open !== null) closeCase(); return; }
  let id = found[1];
  try { id = decodeURIComponent(found[1]); } catch { /* not an encoded id: looked up as it stands */ }
  if (byId.has(id)) { if (state.open !== id) openCase(id); } else { closeCase(); $("shown").textContent = `This report has no case ${id}`; $("cases").scrollIntoView(); }
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input[type=search], select, textarea")) return;
  const open = state.open !== null;
  if (event.key === "j") { if (open) turn(1); else walk(1); }
  else if (event.key === "k") { if (open) turn(-1); else walk(-1); }
  else if (event.key === "b" && viewer) viewer.toggleBlink();
  else if (event.key === "g" && viewer) viewer.toggleGrid();
  else if (event.key === "/" && !open) { event.preventDefault(); $("search").focus(); }
  else if (event.key === "Enter" && !open && !event.target.matches("button, a, summary")) {
    const line = $("table").querySelector("tr.at");
    if (line) { event.preventDefault(); openCase(line.dataset.id); }
  }
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  drawChart();
  if (viewer && viewer.loaded) viewer.profile();
}

function start() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.classList.toggle("dark", system.matches);
  system.addEventListener("change", (event) => theme(event.matches));
  $("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
  document.querySelectorAll(".stat").forEach((button) => button.addEventListener("click", () => {
    state.kinds = new Set([button.dataset.kind]); filtered(); $("cases").scrollIntoView();
  }));
  $("all-rows").addEventListener("click", () => { state.all = true; drawTable(); });
  $("more-surprises")?.addEventListener("click", (event) => { document.querySelector(".surprises").classList.add("all"); event.target.remove(); });
  $("effects").addEventListener("toggle", drawEffects);
  $("detail").addEventListener("close", closeCase);
  $("detail").addEventListener("click", (event) => { if (event.target === $("detail")) closeCase(); });
  window.addEventListener("hashchange", route);
  window.addEventListener("popstate", route);
  document.addEventListener("keydown", keys);
  drawDecision();
  drawFilters();
  drawTable();
  chartControls();
  drawChart();
  route();
}

start();
