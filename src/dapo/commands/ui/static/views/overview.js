// Curves of one run or several, and what the runs came to against what is different in them.

import { COLOURS, LineChart } from "../charts.js";
import { fill, formatOf, h, note, number, panel, percent, remaining, seconds, segmented, table } from "../dom.js";
import { saveCsv } from "../tools.js";

const POINTS = 400;

export async function mount(element, api) {
  const metrics = await api.get("metrics", { run: api.runs });
  const chosen = { smoothing: Number(api.params.smoothing ?? 0), x: api.params.x ?? "step", apart: api.params.apart === "true" };
  let extra = (api.params.more ?? "").split(",").filter((name) => metrics.available.includes(name));
  const charts = new Map();
  const tiles = h("div", { class: "panel tiles" }), grid = h("div", { class: "grid" }), compared = h("div");
  const remember = () => api.keep({ smoothing: chosen.smoothing || "", x: chosen.x === "step" ? "" : chosen.x, apart: chosen.apart, more: extra.join(",") });
  let data = {};

  const about = (name) => metrics.known[name] ?? Object.entries(metrics.known).find(([pattern]) => pattern.includes("{}") && name.startsWith(pattern.split("{}")[0]))?.[1] ?? {};

  function chartOf(name) {
    if (!charts.has(name)) {
      const { unit = "", meaning = "" } = about(name);
      const chart = new LineChart({ title: name, unit, meaning, format: formatOf(unit) });
      chart.named = true;
      [chart.window, chart.zoomed] = [[...charts.values()][0]?.window ?? null, () => load()];
      charts.set(name, chart);
    }
    const chart = charts.get(name);
    chart.xName = { step: "step", "time/elapsed": "s", tokens: "tokens" }[chosen.x];
    return chart;
  }

  const sets = () => (chosen.apart ? api.runs.map((run) => [run]) : metrics.experiments);
  const titleOf = (runs) => {
    const seeds = new Set(runs.map((run) => metrics.seeds[run])).size;
    return runs.length < 2 ? runs[0] : `${seeds < runs.length ? `${runs.length} runs, ` : ""}${seeds} seed${seeds > 1 ? "s" : ""} (${runs[0]} …): mean, and lowest to highest`;
  };

  function draw() {
    const names = [...metrics.headlines, ...extra.filter((name) => !metrics.headlines.includes(name))];
    for (const name of names) {
      const series = sets().map((runs, place) => {
        const curves = data[runs[0]] ?? {}, points = curves[name] ?? [], together = runs.length > 1;
        const band = together ? points.map(([x, , low, high]) => [x, low, high]) : name === "eval/accuracy" ? interval(curves) : undefined;
        const about = together && `${runs.join(", ")}; of the steps that all of them have`;
        return { name: titleOf(runs), about, colour: COLOURS[place % COLOURS.length], points, band, marks: curves.changes };
      });
      chartOf(name).set(series, name.startsWith("eval/") ? 0 : chosen.smoothing);
    }
    fill(grid, names.length ? names.map((name) => chartOf(name).element) : note("no values"));
  }

  async function load() {
    const wanted = [...new Set([...metrics.headlines, ...extra, "eval/accuracy_low", "eval/accuracy_high"])];
    const zoomed = [...charts.values()].find((chart) => chart.window && chart.series.length), xs = zoomed?.every();
    const part = zoomed ? (zoomed.window[1] - zoomed.window[0]) / (Math.max(...xs) - Math.min(...xs)) : 1;  // so that it is not coarse
    data = await api.get("curves", { run: api.runs, metric: wanted, points: Math.min(5000, Math.ceil(POINTS / part)), x: chosen.x, together: !chosen.apart });
    draw();
    drawTiles();
  }

  function drawTiles() {
    const run = api.info(api.run);
    if (!run) return;
    const last = run.last ?? {}, alarms = (last["alarms/count"] ?? 0) + (last["monitor/alarms"] ?? 0);
    const [left, how] = run.left ? remaining(run.left) : ["–", "known after the first step"], ended = run.state !== "running";
    const tile = (value, name, kind = "") => h("div", { class: "tile" }, h("b", { class: kind }, value), h("span", {}, name));
    const speed = last["tokens_per_second/total"];
    fill(tiles,
      tile(`${run.steps}${run.planned ? ` / ${run.planned}` : run.budget ? ` in ${run.budget}` : ""}`, `${api.runs.length > 1 ? `${run.name}: ` : ""}step, ${run.state}`),
      !ended && tile(left, `left: ${how}`),
      run.after !== null && tile(`${percent(run.before)} → ${percent(run.after)}`, "held-out accuracy, first and last"),
      tile(number(last["reward/mean"]), "mean reward"),
      tile(number(last["response_length/mean"]), "tokens per response"),
      tile(number(last.entropy), "entropy, nats"),
      tile(number(speed), "tokens per second"),
      tile(seconds(run.seconds), ended ? "in all" : "so far"),
      h("div", { class: "tile" }, h("b", {}, alarms ? h("a", { class: "warm", href: "#", onclick: (event) => { event.preventDefault(); api.go("alarms"); } }, String(alarms)) : "0"), h("span", {}, `${alarms === 1 ? "alarm on" : "alarms on"}${ended ? " at the end" : ""}`)));
  }

  async function drawAblation() {
    if (api.runs.length < 2) return fill(compared);
    const found = await api.get("ablation", { run: api.runs });
    const best = Object.fromEntries(found.metrics.map((metric) => [metric, Math.max(...found.rows.map((row) => row.final[metric] ?? -Infinity))]));
    const widest = (key) => Math.max(...found.rows.map((row) => shown(row.config[key]).length));
    const keys = [...found.keys].sort((a, b) => widest(a) - widest(b));  // numbers and names before paths
    const higher = new Set(["eval/accuracy", "accuracy", "reward/mean"]);
    fill(compared, panel(`What it came to${api.runs.some((name) => api.info(name)?.state === "running") ? " so far" : ""}, against what is different`, table(
      ["run", "steps", ...found.metrics, ...keys],
      found.rows.map((row) => [
        h("span", { class: `nowrap` }, h("span", { class: COLOURS[sets().findIndex((runs) => runs.includes(row.run)) % COLOURS.length] }, "■ "), row.run), row.steps,
        ...found.metrics.map((metric) => h("td", { class: higher.has(metric) && row.final[metric] === best[metric] ? "best" : "" }, formatOf(about(metric).unit)(row.final[metric]))),
        ...keys.map((key) => h("td", { class: "value short", title: shown(row.config[key]) }, shown(row.config[key]))),
      ])), note("Means of the last ten steps; of evaluations and time the last value.")));
  }

  const picker = h("select", { "aria-label": "add a curve", onchange: () => {
    if (picker.value) extra = [...extra.filter((name) => name !== picker.value), picker.value];
    picker.value = "";
    remember();
    load();
  } }, h("option", { value: "" }, "add a curve…"), metrics.available.filter((name) => !metrics.headlines.includes(name)).map((name) => h("option", { value: name }, name)));
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.smoothing, "aria-label": "smoothing", oninput: () => {
    chosen.smoothing = Number(slider.value);
    remember();
    draw();
  } });
  const bar = h("div", { class: "bar" },
    segmented("horizontal axis", [["step", "steps"], ["time/elapsed", "time"], ["tokens", "tokens"]], chosen.x, (x) => { chosen.x = x; charts.forEach((chart) => (chart.window = null)); remember(); load(); }),
    h("label", {}, "smoothing", slider), picker,
    metrics.experiments.some((runs) => runs.length > 1) && h("label", {}, h("input", { type: "checkbox", checked: !chosen.apart, onchange: (event) => { chosen.apart = !event.target.checked; remember(); load(); drawAblation(); } }), "seeds as one curve"),
    h("button", { type: "button", class: "quiet", onclick: () => saveCsv(api.runs.join(" "), [["metric", "curve", chosen.x, "mean", "lowest", "highest"], ...[...charts].flatMap(([name, chart]) => chart.rows().slice(1).map((row) => [name, ...row]))]) }, "save all as CSV"),
    extra.length > 0 && h("button", { type: "button", class: "quiet", onclick: () => { extra = []; remember(); load(); } }, "fewer curves"));
  fill(element, tiles, bar, compared, grid);
  await Promise.all([load(), drawAblation()]);
  return {
    async refresh({ type }) {
      if (type === "state" || type === "look") drawTiles();
      if (type !== "metrics") return;
      Object.assign(metrics, await api.get("metrics", { run: api.runs }));  // some come later than others
      await Promise.all([load(), drawAblation()]);
    },
  };
}

const interval = (curves) => {
  const high = new Map((curves["eval/accuracy_high"] ?? []).map(([x, y]) => [x, y]));
  const band = (curves["eval/accuracy_low"] ?? []).filter(([x]) => high.has(x)).map(([x, y]) => [x, y, high.get(x)]);
  return band.length ? band : undefined;
};

export const shown = (value) => (value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
