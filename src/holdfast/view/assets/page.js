// The frame: tabs, the route in the address, the keyboard, the theme, and what a live page does when the root changes.

/** ["checkpoint", "step-500", "model.weight"] of "#checkpoint/step-500/model.weight". */
function routeOf() {
  try {
    return location.hash.slice(1).split("/").map(decodeURIComponent);
  } catch {
    return [""];
  }
}

function go(...route) {
  const hash = `#${route.map(encodeURIComponent).join("/")}`;
  if (hash === location.hash) shown();
  else location.hash = hash;
}

function makeTabs() {
  const tabs = views.map((view) => h("button", {
    type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": `panel-${view.id}`, "aria-selected": "false", tabindex: "-1",
    onclick: () => go(view.id),
  }, view.title));
  byId("tabs").append(...tabs);
  byId("tabs").addEventListener("keydown", (event) => {
    const at = views.findIndex((view) => `tab-${view.id}` === event.target.id);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: views.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = views[(to + views.length) % views.length];
    go(next.id);
    byId(`tab-${next.id}`).focus();
  });
  for (const view of views) {
    const panel = h("section", { role: "tabpanel", id: `panel-${view.id}`, "aria-labelledby": `tab-${view.id}`, hidden: true });
    byId("main").append(panel);
    view.build(panel);
  }
}

let current = null;

function shown() {
  const [id, ...rest] = routeOf();
  if (id === "main") return byId("main").focus();
  const next = views.find((view) => view.id === id) ?? views[0];
  const turned = next !== current;
  current = next;
  for (const view of views) {
    const tab = byId(`tab-${view.id}`), here = view === current;
    tab.setAttribute("aria-selected", String(here));
    tab.setAttribute("tabindex", here ? "0" : "-1");
    byId(`panel-${view.id}`).hidden = !here;
    if (here && turned) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  if (turned) scrollTo(0, 0);
  hideTip();
  if (current.show) current.show(rest);
  else if (turned) current.update();
  document.title = `${current.title} · ${summary.root.split("/").at(-1)} · Holdfast`;
  return undefined;
}

function tellState(lost = false) {
  byId("root").textContent = `\u200e${summary.root}`;
  byId("root").title = summary.root;
  const asof = byId("asof");
  asof.className = LIVE ? (lost ? "pulse lost" : "pulse") : "";
  asof.textContent = lost ? "the server does not answer" : LIVE ? (summary.held_by ? "live, a run is writing" : "live") : `as of ${when(summary.generated)}`;
}

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function themeChosen() {
  try {
    return localStorage.getItem("holdfast-theme") ?? "auto";
  } catch {
    return "auto";
  }
}

function setTheme(theme, keep) {
  if (keep) try { localStorage.setItem("holdfast-theme", theme); } catch { /* a page without storage forgets it */ }
  const dark = theme === "dark" || (theme === "auto" && prefersDark.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = THEMES[theme];
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}; choose the next`);
  redraw();
  if (current) shown();
}

function pressed(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing) {
    if (event.key === "Escape") document.activeElement.blur();
    return;
  }
  if (event.key === "/") {
    const search = byId(`panel-${current.id}`).querySelector('input[type="search"]');
    if (!search) return;
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === "ArrowDown" && document.activeElement === document.body) {
    const grid = [...byId(`panel-${current.id}`).querySelectorAll('[role="grid"], [role="treegrid"]')].find((found) => found.checkVisibility());
    if (!grid) return;
    event.preventDefault();
    grid.focus();
  } else if (event.key === "?") byId("keys").showModal();
  else if (/^[1-9]$/.test(event.key) && views[Number(event.key) - 1]) go(views[Number(event.key) - 1].id);
}

function start() {
  setTheme(themeChosen(), false);
  makeTabs();
  tellState();
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(themeChosen()) + 1) % names.length], true);
  });
  prefersDark.addEventListener("change", () => setTheme(themeChosen(), false));
  addEventListener("hashchange", shown);
  addEventListener("keydown", pressed);
  addEventListener("scroll", hideTip, { passive: true });
  for (const view of views) if (view.update && !view.show) view.update();
  shown();
  document.documentElement.dataset.ready = "yes";
  if (!LIVE) return;
  follow(({ lost, first }) => {
    tellState(lost);
    if (lost || first) return;
    for (const view of views) if (!view.show || view === current) view.update();
    announce("the root has changed");
  });
}

start();
