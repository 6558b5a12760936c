// Where each second of a step went, and what every role used of its machine.

import { LineChart, StackChart, lanes } from "../charts.js";
import { bytes, fill, h, labelled, note, number, panel, percent, seconds, table } from "../dom.js";

const COLOUR = { rollout: "s0", sampling: "s7", scoring: "s1", reward_wait: "s1", prepare: "s6", update: "s2", sync: "s3", evaluation: "s4", writing: "s5", other: "c-flat" };
const USES = [["cpu", "CPU", "cores", number], ["rss", "Memory", "", bytes], ["gpu_util", "GPU use", "", percent], ["gpu_memory", "GPU memory", "", bytes], ["gpu_power", "GPU power", "W", number], ["disk_write", "Disk written", "/s", bytes], ["net_received", "Network received", "/s", bytes], ["memory_used", "Memory of the node in use", "", percent], ["idle", "Engines with nothing to sample", "", percent], ["version", "Oldest weights of its engines", "version", number]];

export async function mount(element, api) {
  const phases = new StackChart({ title: "Seconds of each step", height: 220, format: seconds });
  const speed = new LineChart({ title: "Tokens per second", height: 140 });
  const ages = new StackChart({ title: "Groups trained on, by age in versions", height: 140, format: number });
  const idle = new LineChart({ title: "Seconds side by side, and idle", height: 140, format: seconds });
  const ahead = h("div", { class: "columns" }, panel(null, ages.element), panel(null, idle.element)), told = note();
  speed.named = idle.named = true;
  const step = h("input", { type: "number", min: 1, max: 2 ** 31 - 1, value: api.params.step ?? "", placeholder: "last", onchange: () => { if (step.reportValidity()) { api.keep({ step: step.value }); load(); } } });
  const drawn = h("div"), roles = panel(null, h("div", { class: "bar" }, labelled("step and its neighbours", step)), drawn, told);
  const totals = h("div"), used = h("div", { class: "grid" });
  const charts = new Map();
  fill(element, panel(null, phases.element), roles, ahead, h("div", { class: "columns" }, panel("All steps together", totals), panel(null, speed.element)), h("div", { class: "panel" }, h("h2", {}, "Resources"), used));

  async function load() {
    const found = await api.get("time", { run: api.run, step: step.value }), at = Object.keys(COLOUR).filter((name) => found.lanes[name]);
    roles.hidden = !at.length && !step.value;  // older runs have none
    fill(drawn, at.length ? lanes("Roles side by side", at.map((name) => ({ name, colour: COLOUR[name], spans: found.lanes[name] }))) : note("Nothing was recorded of this step."));
    fill(told, found.overlap);
    ahead.style.display = found.ages.rows.length ? "" : "none";  // nothing is sampled ahead
    ages.set(found.ages.names.map((name, place) => ({ name, colour: `s${place % 8}` })), found.ages.rows);
    idle.set([["overlap/seconds", "sampling beside the learner's work", "s7"], ["idle/learner", "learner waits", "s0"], ["idle/engine", "engine has nothing to sample", "s1"]].map(([name, text, colour]) => ({ name: text, colour, points: found.idle[name] })));
    const { names, rows, totals: sums } = found.phases;
    phases.set(names.map((name) => ({ name: name.replaceAll("_", " "), colour: COLOUR[name] })), rows);
    const all = Object.values(sums).reduce((a, b) => a + b, 0) || 1;
    fill(totals, !rows.length ? note("no values") : table(["phase", "time", "share"], names.filter((name) => sums[name] > 0).map((name) => [
      h("span", {}, h("span", { class: COLOUR[name] }, "■ "), name.replaceAll("_", " ")), seconds(sums[name]), percent(sums[name] / all)])));
    speed.set([["rollout", "s0"], ["update", "s2"], ["total", "s4"]].map(([name, colour]) => ({ name, colour, points: found.speeds[`tokens_per_second/${name}`] })));
    drawUses(found);
  }

  function drawUses({ resources, memory }) {
    const roles = [...new Set(resources.map((row) => `${row.role} on ${row.host}`))];
    const series = (name) => roles.map((role, place) => ({ name: role, colour: `s${place % 8}`, points: resources.filter((row) => `${row.role} on ${row.host}` === role && row[name] !== null).map((row) => [row.seconds, row[name], row[name], row[name]]) }));
    const shown = USES.map(([name, title, unit, format]) => [name, title, unit, format, series(name)]).filter(([, , , , lines]) => lines.some((line) => line.points.length));
    if (!shown.length && memory.length) shown.push(["memory", "Peak memory", "", bytes, [{ name: "process", colour: "s0", points: memory }]]);
    for (const [name, title, unit, format, lines] of shown) {
      if (!charts.has(name)) charts.set(name, new LineChart({ title, unit, format, height: 120, xName: name === "memory" ? "step" : "s" }));
      charts.get(name).named = roles.length > 1;
      charts.get(name).set(lines);
    }
    fill(used, shown.length ? shown.map(([name]) => charts.get(name).element) : note("No use of the machine was recorded."));
  }
  await load();
  return { refresh: ({ type }) => (type === "metrics" ? load() : undefined) };
}
