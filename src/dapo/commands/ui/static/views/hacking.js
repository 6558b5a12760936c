// Does the reward that is trained on still mean what it meant?

import { LineChart, heat } from "../charts.js";
import { fill, h, note, number, panel, percent, table } from "../dom.js";

export async function mount(element, api) {
  const both = new LineChart({ title: "Trained reward and held-out check", unit: "reward", height: 170 });
  const wrong = new LineChart({ title: "Right by the reward, wrong by the check", height: 170, format: percent });
  const length = new LineChart({ title: "Correlation of reward and length within groups", height: 170 });
  const map = h("div"), samples = h("div"), said = h("div");
  both.named = true;
  wrong.nothing = "no held-out check";
  fill(element, said, h("div", { class: "columns" }, panel(null, both.element), panel(null, wrong.element)), h("div", { class: "columns" }, panel(null, length.element), panel(null, map)), samples);

  async function load() {
    const found = await api.get("hacking", { run: api.run });
    const { curves } = found, checked = curves["monitor/check"].length > 0;
    fill(said, !checked && !found.checked && note("This run had no held-out check. monitor.check of a recipe names a second reward that is never trained on; it is asked about a share of the samples."));
    both.set([{ name: "trained reward", colour: "s0", points: checked ? curves["monitor/reward"] : curves["reward/mean"] }, { name: "held-out check", colour: "s1", points: curves["monitor/check"] }]);
    wrong.set([{ name: "false right", colour: "s1", points: curves["monitor/false_right"] }]);
    length.set([{ name: "correlation", colour: "s0", points: curves["monitor/length_correlation"] }]);
    fill(map, found.lengths.cells.length ? heat("Reward against length", found.lengths, "tokens", "reward") : note("no rewarded sample"));
    fill(samples, found.disagreements.length > 0 && panel(`Where they disagree most: ${number(found.disagreements.length)} of ${number(found.disagree)} samples`, table(["reward", "check", "step", "tokens", "prompt and response", "answer", "gold"], found.disagreements.map((row) => [
      h("span", { class: row.correct ? "good nowrap" : "warm nowrap" }, `${row.correct ? "✓ right" : "✗ wrong"} ${number(row.reward)}`), h("span", { class: "nowrap" }, row.check_correct ? "right" : "wrong"),
      h("a", { href: "#", onclick: (event) => { event.preventDefault(); api.go("groups", { at: row.step, draw: row.draw }); } }, row.step), row.length,
      h("td", { class: "value" }, h("span", { class: "muted" }, row.prompt, " "), row.response), h("td", { class: "value" }, row.extracted ?? "–"), h("td", { class: "value" }, row.gold ?? "–")]))));
  }
  await load();
  return { refresh: ({ type }) => (type === "samples" ? load() : undefined) };
}
