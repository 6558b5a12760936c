// The frame: which runs and which view, the address, the connection for what is new. Views are in views/.

import { fill, h, note, percent, remaining, roving } from "./dom.js";
import { address, ask } from "./server.js";

const TABS = [
  ["overview", "Overview", "./views/overview.js"],
  ["groups", "Groups", "./views/groups.js"],
  ["sampling", "Dynamic sampling", "./views/sampling.js"],
  ["time", "Time & resources", "./views/time.js"],
  ["alarms", "Alarms", "./views/alarms.js"],
  ["config", "Config", "./views/config.js"],
  ["evaluation", "Evaluation", "./views/evaluation.js"],
  ["hacking", "Hacking", "./views/hacking.js"],
  ["playground", "Playground", "./playground.js"],
  ["compare", "Compare", "./votes.js"],
  ["comparison", "Recipes", "./views/comparison.js"],
];
const OF_SEVERAL = new Set(["overview", "config"]);
const byId = (id) => document.getElementById(id);
// asked: the runs that the address names; runs: those of them that are there
const state = { tab: "overview", asked: [], runs: [], params: {}, list: [], mounted: null };

const api = {
  get: (path, params) => ask(address(path, params)),
  get runs() { return state.runs; },
  get run() { return state.runs[0]; },
  get params() { return state.params; },
  get tab() { return state.tab; },
  info: (name) => state.list.find((run) => run.name === name),
  get running() { return api.info(api.run)?.state === "running"; },
  href: (tab, params) => hash(tab, params),
  go: (tab, params = {}) => { location.hash = hash(tab, params); },
  keep: (params) => {  // in the address, without a new entry in the history
    state.params = params;
    history.replaceState(null, "", hash(state.tab, params));
  },
};

// --- address: #tab?run=a&run=b&step=3 --------------------------------------------------------------------------------

const hash = (tab, params = {}) => {
  const query = new URLSearchParams([...state.runs.map((run) => ["run", run]), ...Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false)]);
  return `#${tab}?${query}`;
};

function readAddress() {
  const [tab, query = ""] = location.hash.slice(1).split("?");
  const params = new URLSearchParams(query);
  state.tab = TABS.some(([id]) => id === tab) ? tab : "overview";
  state.asked = params.getAll("run");
  if (!state.asked.length) state.asked = state.list.filter((run) => run.state !== "unreadable").slice(0, 1).map((run) => run.name);
  state.runs = state.asked.filter((name) => api.info(name));
  params.delete("run");
  state.params = Object.fromEntries(params);
}

// --- frame ----------------------------------------------------------------------------------------------------------

function drawTabs() {
  const tabs = TABS.map(([id, name]) =>
    h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "view", "aria-selected": String(id === state.tab), tabindex: id === state.tab ? 0 : -1, onclick: () => api.go(id) }, name));
  const focused = byId("tabs").contains(document.activeElement);
  fill(byId("tabs"), tabs);
  byId("tabs").onkeydown = roving(tabs);
  const chosen = byId(`tab-${state.tab}`);
  if (focused) chosen.focus();
  chosen.scrollIntoView({ block: "nearest", inline: "nearest" });
  byId("view").setAttribute("aria-labelledby", chosen.id);
  document.title = `${chosen.textContent} · ${state.runs.join(", ") || "dapo"}`;
}

function drawRuns() {
  const rows = state.list.map((run) => {
    const here = state.runs.includes(run.name);
    const go = () => api.go(state.tab, OF_SEVERAL.has(state.tab) ? state.params : {});  // a group is of one run
    const toggle = () => {
      const left = state.runs.filter((name) => name !== run.name);
      state.runs = here ? (left.length ? left : state.runs) : [...left, run.name];
      go();
    };
    const only = (event) => {
      if (event.target.tagName === "INPUT") return;
      event.preventDefault();
      state.runs = [run.name];
      go();
    };
    const gain = run.after !== null && run.after !== undefined ? ` · ${percent(run.after)}` : "";
    return h("label", { class: `run ${run.state} ${here ? "chosen" : ""}`, title: `${run.path}\n${run.status}\nClick: this one alone. Box: beside the others.`, onclick: only },
      h("input", { type: "checkbox", checked: here, disabled: run.state === "unreadable", "aria-label": `show ${run.name}`, onchange: toggle }),
      h("span", { class: "name" }, run.name),
      h("span", { class: "facts" }, run.state === "unreadable" ? "cannot be read" : `${run.state} · ${run.steps}${run.planned ? `/${run.planned}` : run.budget ? ` in ${run.budget}` : ""}${gain}${run.left ? ` · ${remaining(run.left)[0]} left` : ""}`));
  });
  const focused = document.activeElement?.getAttribute?.("aria-label");
  fill(byId("runs"), h("h2", {}, `${state.list.length} run${state.list.length === 1 ? "" : "s"}`), rows);
  if (focused) document.querySelector(`#runs [aria-label="${CSS.escape(focused)}"]`)?.focus();
  byId("chosen").textContent = state.runs.length ? state.runs.join(", ") : "no run yet";
  if (byId("live").className === "on") byId("live").textContent = state.runs.some((name) => api.info(name).state === "running") ? "live" : "connected";
}

let turn = 0;
async function drawView() {
  const mine = ++turn, view = byId("view");
  state.mounted?.close?.();
  state.mounted = null;
  const element = h("section", { class: `view ${state.tab}` });
  const gone = state.asked.filter((name) => !api.info(name));
  const problem = state.problem ?? (gone.length ? `There is no run ${gone.join(", ")} here. ${state.list.length ? "Choose one of the list." : ""}` : null);
  if (!state.runs.length && problem) return fill(view, h("p", { class: "problem", role: "alert" }, problem));
  if (!state.runs.length) return fill(view, note("No run here yet. This page shows it as soon as there is one."));
  try {
    const module = await import(TABS.find(([id]) => id === state.tab)[2]);
    if (mine !== turn) return;
    fill(view, gone.length > 0 && h("p", { class: "problem", role: "alert" }, problem), state.runs.length > 1 && !OF_SEVERAL.has(state.tab) && note("Of ", h("b", {}, state.runs[0]), ": this view shows the first of the runs that are chosen."), element);
    const mounted = await module.mount(element, api);
    if (mine === turn) state.mounted = mounted ?? null;
    else mounted?.close?.();
  } catch (error) {
    if (mine === turn) fill(view, h("p", { class: "problem", role: "alert" }, error.message));
  }
  view.dataset.ready = state.tab;
}

// --- what is new ----------------------------------------------------------------------------------------------------

let waiting = null;
const news = new Map();
const progress = () => JSON.stringify(state.runs.map((name) => [api.info(name)?.state, api.info(name)?.steps]));

function heard(type) {
  news.set(type, { type });
  waiting ??= setTimeout(async () => {
    const events = [...news.values()], before = progress();
    news.clear();
    waiting = null;
    await loadRuns();
    if (events.some((one) => one.type === "look") && progress() !== before) events.push({ type: "metrics" }, { type: "samples" }, { type: "state" });
    if (state.runs.some((name) => !state.problem && !api.info(name))) {  // deleted: say so, and not by another run
      api.keep(state.params);
      return start();
    }
    drawRuns();
    if (!state.mounted || state.runs.length < state.asked.length) return events.some((one) => one.type === "runs") && start();
    for (const one of events) {
      try {
        await state.mounted?.refresh?.(one);
      } catch (error) {
        console.warn("not refreshed:", error.message);
      }
    }
  }, 250);
}

let watch = 0;
async function listen() {  // asks each second what has changed
  const mine = ++watch;
  const say = (text, kind) => { byId("live").textContent = text; byId("live").className = kind; };
  const differ = (one, other) => JSON.stringify(one) !== JSON.stringify(other);
  for (let known = null; mine === watch; await new Promise((done) => setTimeout(done, 1000))) {
    const now = await api.get("changes", { run: state.asked }).catch(() => null);
    if (mine !== watch) return;
    if (!now) {
      say("not connected", "off");
    } else if (!known) {
      say("connected", "on");
      heard(!state.runs.length || state.runs.length < state.asked.length ? "runs" : "look");  // for what came before
    } else {
      if (differ(known.runs, now.runs)) heard("runs");
      for (const [name, marks] of Object.entries(now.of)) {
        for (const type of ["metrics", "samples", "state"]) if (known.of[name] && differ(known.of[name][type], marks[type])) heard(type);
      }
    }
    known = now;
  }
}

async function loadRuns() {
  try {
    [state.list, state.problem] = [await api.get("runs"), null];
  } catch (error) {
    state.problem = error.message;
  }
}

let listened = null;
async function start() {
  readAddress();
  drawTabs();
  drawRuns();
  if (listened !== state.asked.join("\n")) {
    listened = state.asked.join("\n");
    listen();
  }
  await drawView();
}

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const now = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const draw = () => { byId("theme").textContent = now() === "dark" ? "☀" : "☾"; byId("theme").title = now() === "dark" ? "light" : "dark"; };
  byId("theme").onclick = () => {
    document.documentElement.dataset.theme = now() === "dark" ? "light" : "dark";
    localStorage.setItem("dapo-theme", document.documentElement.dataset.theme);
    draw();
  };
  dark.onchange = draw;
  draw();
}

const narrow = matchMedia("(max-width: 760px)");
const fold = () => (byId("side").open = !narrow.matches);
narrow.onchange = fold;
fold();
themeButton();
await loadRuns();
setInterval(() => state.list.some((run) => run.state === "running") && heard("look"), 15_000);  // others end, too, and time passes
addEventListener("hashchange", start);
await start();
