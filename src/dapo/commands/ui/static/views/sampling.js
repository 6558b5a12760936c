// Dynamic sampling: which groups had something to learn from, what that cost, how hard the prompts were.

import { LineChart, StackChart, bars } from "../charts.js";
import { fill, h, note, number, panel, percent, table } from "../dom.js";

const KINDS = [["groups/all_wrong", "all wrong", "c-wrong"], ["groups/mixed", "mixed", "c-mixed"], ["groups/all_right", "all right", "c-right"], ["groups/flat", "flat", "c-flat"]];

const LABELS = ["none", ">0%", "≥13%", "≥25%", "≥38%", "≥50%", "≥63%", "≥75%", "≥88%", "all"];

export async function mount(element, api) {
  const kinds = new StackChart({ title: "Groups of each step", unit: "drawn", height: 190, format: number });
  const shares = new StackChart({ title: "As shares", height: 190, format: percent });
  const kept = new LineChart({ title: "Prompts drawn and groups kept", unit: "groups", height: 140 });
  const tokens = new LineChart({ title: "Tokens generated, filtered and wasted", unit: "tokens", height: 140 });
  kept.named = tokens.named = true;
  const difficulty = h("div"), statuses = h("div");
  fill(element, note("A group is trained on if its samples differ. Groups that are all right or all wrong teach nothing: they are filtered, and other prompts are drawn in their place."),
    h("div", { class: "columns" }, panel(null, kinds.element), panel(null, shares.element)),
    h("div", { class: "columns" }, panel(null, kept.element), panel(null, tokens.element)),
    h("div", { class: "columns" }, panel(null, difficulty), panel("What became of the groups", statuses)));

  async function load() {
    const found = await api.get("sampling", { run: api.run });
    const { curves } = found;
    const parts = KINDS.filter(([name]) => name !== "groups/flat" || curves[name].some((point) => point[1]));
    const rows = curves["groups/drawn"].map(([step], place) => [step, ...parts.map(([name]) => curves[name][place]?.[1] ?? 0)]);
    const named = parts.map(([, name, colour]) => ({ name, colour }));
    kinds.set(named, rows);
    shares.set(named, rows, true);
    kept.set([{ name: "drawn", colour: "s4", points: curves["groups/drawn"] }, { name: "kept", colour: "s0", points: curves["groups/kept"] }]);
    tokens.set([{ name: "generated", colour: "s0", points: curves["tokens/generated"] }, { name: "filtered: nothing to learn from", colour: "s4", points: curves["tokens/filtered"] }, { name: "wasted: surplus, stale, cancelled", colour: "s1", points: curves["tokens/wasted"] }]);
    const share = (values) => { const sum = values.reduce((a, b) => a + b, 0) || 1; return values.map((value) => value / sum); };
    const span = found.tenth > 1 ? `${found.tenth} steps` : "step";
    if (!found.statuses.length) return [difficulty, statuses].forEach((place) => fill(place, note("No group was drawn.")));
    fill(difficulty, bars("How many samples of a group were right", LABELS,
      [{ name: `first ${span}`, colour: "s4", values: share(found.difficulty.first) }, { name: `last ${span}`, colour: "s0", values: share(found.difficulty.last) }]));
    fill(statuses, table(["status", "groups", "of those drawn", "samples", "tokens", ""], found.statuses.map((row) => [
      row.samples === null ? row.status.replaceAll("_", " ") : h("a", { href: "#", onclick: (event) => { event.preventDefault(); api.go("groups", { status: row.status }); } }, row.status.replaceAll("_", " ")),
      number(row.groups), percent(row.groups / (found.drawn || row.groups)), number(row.samples), number(row.tokens), h("span", { class: "muted" }, row.why)])));
  }
  await load();
  return { refresh: ({ type }) => (type === "samples" || type === "metrics" ? load() : undefined) };
}
