// What in the course of the run says that it is going wrong, in which steps, and what to do about it.

import { fill, h, note, panel } from "../dom.js";

export async function mount(element, api) {
  async function load() {
    const found = await api.get("alarms", { run: api.run });
    const raised = found.alarms.filter((alarm) => alarm.steps.length), calm = found.alarms.filter((alarm) => !alarm.steps.length);
    fill(element,
      panel(raised.length ? `${raised.length} of ${found.alarms.length} alarms were on at some time` : null, raised.length ? raised.map((alarm) => draw(alarm, found.steps, api.running)) : note(found.steps ? `No alarm in ${found.steps} steps.` : "No step is done.")),
      found.warnings.length > 0 && panel("To know", h("ul", {}, found.warnings.map((text) => h("li", {}, text)))),
      !found.readable && note("The recipe of this run is of another version of dapo: only signs of reward hacking are known."),
      found.readable && panel("Watched, and calm", note(calm.map((alarm) => alarm.name).join(" · ") || "none")));
  }
  await load();
  return { refresh: ({ type }) => (type === "metrics" ? load() : undefined) };
}

function draw(alarm, steps, running) {
  const now = alarm.steps.at(-1) === steps;
  const runs = [];
  for (const step of alarm.steps) {
    if (runs.length && runs.at(-1)[1] === step - 1) runs.at(-1)[1] = step;
    else runs.push([step, step]);
  }
  const width = 1000 / Math.max(steps, 1);
  const strip = h("svg", { class: "strip", viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img", "aria-label": `on in steps ${runs.map(([a, b]) => (a === b ? a : `${a} to ${b}`)).join(", ")}` },
    h("rect", { class: "base", x: 0, y: 5, width: 1000, height: 4 }), runs.map(([a, b]) => h("rect", { x: (a - 1) * width, y: 2, width: Math.max((b - a + 1) * width, 2), height: 10 }, h("title", {}, a === b ? `step ${a}` : `steps ${a} to ${b}`))));
  return h("div", { class: "alarm" },
    h("h3", {}, alarm.name, h("span", { class: `tag ${now ? "warm" : ""}` }, now ? (running ? "on" : "on at the end") : `last in step ${alarm.steps.at(-1)}`), h("span", { class: "muted" }, `in ${alarm.steps.length} of ${steps} steps`)),
    h("p", {}, alarm.seen), strip, h("p", { class: "muted" }, `${alarm.advice}. Watches ${alarm.reads.join(", ")}.`));
}
