// Recipes of a comparison against each other: its table, its curves, and blind votes on their answers.

import { COLOURS, LineChart } from "../charts.js";
import { fill, h, note, number, panel, percent, table } from "../dom.js";
import { voting } from "../votes.js";

export async function mount(element, api) {
  const place = h("div"), grid = h("div", { class: "grid" }), votes = h("div"), charts = new Map();
  let vote = null;

  async function load() {
    const found = await api.get("comparison", { run: api.run });
    if (!found) {
      fill(element, note("This run belongs to no comparison. dapo compare makes one."));
      return;
    }
    const [head, ...wins] = found.wins;
    fill(place, panel(`Comparison ${found.name}`, table(["", ...found.recipes], found.lines), found.failures.map((text) => note(text))),
      wins.length > 0 && panel("Win rates", table(head, wins), note("A tie is half a win.")));
    for (const [axis, curves] of Object.entries(found.curves)) {
      if (!charts.has(axis)) charts.set(axis, new LineChart({ title: `held-out ${found.metric} by ${axis}`, format: found.metric === "accuracy" ? percent : number }));
      const chart = charts.get(axis);
      [chart.xName, chart.named] = [axis, true];
      chart.set(found.recipes.map((name, at) => ({ name, colour: COLOURS[at % COLOURS.length], points: curves[name],
        band: curves[name].map(([x, , low, high]) => [x, low, high]) })), 0);
    }
    fill(grid, [...charts.values()].map((chart) => chart.element));
    vote ??= voting(votes, api.run, { models: found.recipes.map((name) => ({ name })), temperature: null }, "comparison/votes");
  }
  fill(element, place, grid, panel("Which answer is better?", votes));
  await load();
  return { refresh: ({ type }) => (type === "metrics" || type === "state" ? load() : undefined), close: () => vote?.close() };
}
