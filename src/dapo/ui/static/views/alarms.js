// What in the course of the run says that it is going wrong, in which steps, and what to do about it.

import { fill, h, note, panel } from "../dom.js";

export async function mount(element, api) {
  async function load() {
    const found = await api.get("alarms", { run: api.run });
    const raised = found.alarms.filter((alarm) => alarm.steps.length), calm = found.alarms.filter((alarm) => !alarm.steps.length);
    const hacking = found.hacking.length && { name: "reward hacking", steps: found.hacking, seen: "one of three signs: the held-out check calls wrong what is rewarded, it does not rise with the reward, or reward and length go together", advice: "the view Hacking shows which: see reward against length there, and read samples that the check (monitor.check, if the run has one) disputes", reads: ["monitor/alarms"] };
    const all = [...(hacking ? [hacking] : []), ...raised];
    fill(element,
      panel(all.length ? `${all.length} of ${found.alarms.length + 1} alarms were on at some time` : null, all.length ? all.map((alarm) => draw(alarm, found.steps)) : note(`No alarm in ${found.steps} steps.`)),
      found.warnings.length > 0 && panel("To know", h("ul", {}, found.warnings.map((text) => h("li", {}, text)))),
      panel("Watched, and calm", note(calm.map((alarm) => alarm.name).join(" · ") || "none")));
  }
  await load();
  return { refresh: ({ type }) => (type === "metrics" ? load() : undefined) };
}

function draw(alarm, steps) {
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
    h("h3", {}, alarm.name, h("span", { class: `tag ${now ? "warm" : ""}` }, now ? "on" : `last in step ${alarm.steps.at(-1)}`), h("span", { class: "muted" }, `in ${alarm.steps.length} of ${steps} steps`)),
    h("p", {}, alarm.seen), strip, h("p", { class: "muted" }, `${alarm.advice}. Watches ${alarm.reads.join(", ")}.`));
}
