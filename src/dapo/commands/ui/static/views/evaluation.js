// The held-out rows: before, after, and every evaluation between, with 95% intervals.

import { LineChart } from "../charts.js";
import { fill, h, note, number, panel, percent, table } from "../dom.js";

const SHARES = /accuracy|pass@|maj@|truncated|no_answer|lenient|errors/;

export async function mount(element, api) {
  const chart = new LineChart({ title: "Accuracy on the held-out rows", unit: "95% interval", height: 200, format: percent });
  const head = h("div"), all = h("div");

  async function load() {
    const { evaluations, stopped, best } = await api.get("evaluation", { run: api.run });
    if (!evaluations.length) return fill(element, note(api.running ? "No evaluation yet." : "This run was not evaluated.", " A run is evaluated on the rows that evaluation.data of its recipe names."));
    if (!head.isConnected) fill(element, head, panel(null, chart.element), all);
    const points = evaluations.filter((one) => one["eval/accuracy"] !== undefined && one["eval/accuracy"] !== null);
    chart.set([{ name: "accuracy", colour: "s0", points: points.map((one) => [one.step, one["eval/accuracy"], one["eval/accuracy"], one["eval/accuracy"]]), band: points.filter((one) => one["eval/accuracy_low"] !== undefined).map((one) => [one.step, one["eval/accuracy_low"], one["eval/accuracy_high"]]) }]);
    const names = [...new Set(evaluations.flatMap((one) => Object.keys(one)))].filter((name) => name !== "step" && !/_low$|_high$/.test(name)).sort((a, b) => rank(a) - rank(b));
    const form = (name, value) => (SHARES.test(name) ? percent(value) : number(value));
    const range = (one, name) => (one[`${name}_low`] !== undefined ? h("span", { class: "muted nowrap" }, `  ${percent(one[`${name}_low`])} – ${percent(one[`${name}_high`])}`) : null);
    const [first, last] = [evaluations[0], evaluations.at(-1)];
    const when = ({ step }) => (step ? `after step ${step}` : "before training");
    fill(head, panel(`Evaluated ${last === first ? when(first) : `${when(first)} and ${when(last)}`}${stopped ? ` (${stopped})` : ""}`, table(["", when(first), when(last), "change"], names.filter((name) => name !== "eval/rows").map((name) => [
      titled(name), h("td", {}, form(name, first[name]), range(first, name)), h("td", { class: "best" }, form(name, last[name]), range(last, name)),
      first[name] === undefined || last[name] === undefined || first[name] === null || last[name] === null ? "–" : change(name, last[name] - first[name])])),
      note(`${number(last["eval/rows"])} held-out rows.${best.step !== undefined ? ` The best evaluation was ${best.step ? `after step ${best.step}` : "the one before training"}.` : ""}`)));
    fill(all, panel("All evaluations", table(["step", ...names.map(titled)], evaluations.map((one) => [
      h("td", { class: one.step === best.step ? "best" : "" }, `${one.step}${one.step === best.step ? " (best)" : ""}`), ...names.map((name) => h("td", {}, form(name, one[name]), range(one, name)))]))));
  }
  await load();
  return { refresh: ({ type }) => (type === "metrics" ? load() : undefined) };
}

const NAMES = { response_length: "response length, tokens", lenient: "right, whatever the form", no_answer: "no answer found" };
const titled = (name) => { const plain = name.replace("eval/", ""); return NAMES[plain] ?? plain.replaceAll("_", " "); };

const ORDER = ["eval/accuracy", "eval/pass@", "eval/maj@", "eval/reward", "eval/response_length"];
const rank = (name) => { const place = ORDER.findIndex((start) => name.startsWith(start)); return place < 0 ? ORDER.length : place; };

const change = (name, value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${SHARES.test(name) ? `${(100 * Math.abs(value)).toFixed(1)} points` : number(Math.abs(value))}`;
