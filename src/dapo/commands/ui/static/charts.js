// Charts as SVG. A chart is made once and given data as often as there is new data; all charts share one cursor.

import { bytes, fill, h, number, percent, seconds } from "./dom.js";
import { toolsOf } from "./tools.js";
import { watchZoom, zoomBy } from "./zoom.js";

const MARGIN = { right: 10, top: 8, bottom: 20 };
export const COLOURS = Array.from({ length: 8 }, (_, place) => `s${place}`);

const charts = new Set();
export const eachChart = (act) => charts.forEach((chart) => (chart.element.isConnected ? act(chart) : charts.delete(chart)));
const moveCursors = (x) => eachChart((chart) => chart.point(x));

const resized = new ResizeObserver((entries) => entries.forEach((entry) => {
  const width = Math.round(entry.contentRect.width);
  if (width && width !== entry.target.chart.width) {
    entry.target.chart.width = width;
    entry.target.chart.draw();
  }
}));

export function niceTicks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

// Powers of ten, or round numbers where there are not two of them.
function logTicks(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)], every = Math.ceil((last - first + 1) / 5);
  return last > first ? Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => 10 ** (first + i * every)) : niceTicks(low, high, 3).filter((tick) => tick > 0);
}

// No more decimals than it takes to tell the ticks apart.
function tickLabels(ticks, format) {
  const plain = format === number && ticks.every((tick) => tick === 0 || (Math.abs(tick) < 1e4 && Math.abs(tick) >= 1e-3));
  if (format !== percent && !plain) return ticks.map(format);
  const scaled = format === percent ? ticks.map((tick) => 100 * tick) : ticks;
  const decimals = [0, 1, 2, 3].find((count) => scaled.every((tick) => Math.abs(tick - Number(tick.toFixed(count))) < 1e-9 + Math.abs(tick) * 1e-6)) ?? 3;
  return scaled.map((tick) => tick.toFixed(decimals) + (format === percent ? "%" : ""));
}

// Exponential moving average that starts unbiased; weight 0 leaves the values as they are.
export function smooth(points, weight) {
  let mean = 0, mass = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, mean / mass];
  });
}

// Vertical lines where settings of a run were changed, with words as a tooltip; series: each may have marks [[x, text]].
const marks = (frame, series) => series.flatMap(({ marks = [], name, colour }) => marks
  .filter(([x]) => frame.inside(x))
  .map(([x, text]) => h("g", { class: `mark ${colour}`, stroke: "currentColor", "stroke-dasharray": "1 3" },
    h("title", {}, series.length > 1 ? `${name}, ${text}` : text), frame.line(x),
    h("rect", { x: frame.X(x) - 5, width: 11, height: frame.height, fill: "transparent", stroke: "none" }))));  // wide enough to point at

class Frame {
  constructor({ title, unit = "", meaning = "", height = 150, format = number, xName = "step" }) {
    Object.assign(this, { title, unit, meaning, height, format, xName, width: 0, left: 40, extent: null, window: null, log: false, nothing: "no values" });
    this.readout = h("output", { class: "readout" });
    this.plot = h("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${title}: arrow keys read the values, plus and minus zoom, 0 shows all` });
    this.legend = h("div", { class: "legend" });
    this.said = h("p", { class: "said", role: "status" });
    this.element = h("figure", { class: "chart", "data-chart": title },
      h("figcaption", { title: meaning }, h("b", {}, title), unit && format !== percent && !title.startsWith(unit) && h("span", { class: "muted" }, ` ${unit}`), this.readout, toolsOf(this)), this.plot, this.legend, this.said);
    this.plot.chart = this;
    resized.observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.extent && moveCursors(this.placeOf(event.clientX)));
    this.plot.addEventListener("pointerleave", () => moveCursors(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("blur", () => moveCursors(null));
    watchZoom(this);
    charts.add(this);
  }

  scale(xs, low, high) {
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    const right = this.width - MARGIN.right, bottom = this.height - MARGIN.bottom;
    this.extent = { x0, x1, low, high };
    const unit = this.format === bytes ? 1024 ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024)) : 1;
    this.ticks = low === high ? [low] : this.log ? logTicks(low, high) : niceTicks(low / unit, high / unit, 3).map((tick) => tick * unit);
    this.labels = tickLabels(this.ticks, this.format);
    this.left = 12 + 5.9 * Math.max(3, ...this.labels.map((label) => label.length));
    this.X = (x) => this.left + ((x - x0) / (x1 - x0 || 1)) * (right - this.left);
    const share = this.log ? (y) => Math.log(Math.max(y, low) / low) / Math.log(high / low) : (y) => (y - low) / (high - low || 1);
    this.Y = (y) => bottom - share(y) * (bottom - MARGIN.top);
  }

  axes() {
    const { x0, x1 } = this.extent;
    const right = this.width - MARGIN.right, bottom = this.height - MARGIN.bottom;
    const rows = this.ticks.flatMap((y, place) => [
      h("line", { class: "grid", x1: this.left, x2: right, y1: this.Y(y), y2: this.Y(y) }),
      h("text", { x: this.left - 6, y: this.Y(y) + 3, "text-anchor": "end" }, this.labels[place]),
    ]);
    const whole = this.xName === "step";  // there is no half a step; another axis says its unit at the end
    const places = niceTicks(x0, x1, Math.max(2, Math.round(this.width / 110))).filter((x) => !whole || Number.isInteger(x));
    const columns = places.map((x, i) => whole || i < places.length - 1
      ? h("text", { x: Math.min(this.X(x), right - 8), y: this.height - 5, "text-anchor": "middle" }, number(x))
      : h("text", { x: Math.min(this.X(x) + 14, right), y: this.height - 5, "text-anchor": "end" }, `${number(x)} ${this.xName}`));
    return [...rows, h("line", { class: "axis", x1: this.left, x2: right, y1: bottom, y2: bottom }), ...columns];
  }

  show(...children) {
    this.cursor = h("g", { class: "cursor" });
    fill(this.plot, h("svg", { width: this.width, height: this.height, viewBox: `0 0 ${this.width} ${this.height}`, "aria-hidden": "true" }, ...children, this.cursor));
  }

  empty(why = this.nothing) {
    this.extent = null;
    fill(this.plot, h("p", { class: "muted centre" }, why));
  }

  inside(x) { return !this.window || (x >= this.window[0] && x <= this.window[1]); }

  // What the picture leaves out, in words.
  say(...texts) {
    const [from, to] = !this.window ? [] : this.xName === "step" ? [Math.ceil(this.window[0]), Math.floor(this.window[1])] : this.window.map(number);
    fill(this.said, [this.window && `${this.xName} ${from} to ${to}; double click or 0: all`, ...texts].filter(Boolean).join(". "));
  }

  // Where on the horizontal axis a place in the window is.
  placeOf(clientX) {
    const { x0, x1 } = this.extent, share = (clientX - this.plot.getBoundingClientRect().left - this.left) / (this.width - this.left - MARGIN.right);
    return x0 + Math.min(1, Math.max(0, share)) * (x1 - x0);
  }

  #key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], zoom = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity }[event.key];
    if (event.ctrlKey || event.metaKey || (!by && !zoom) || !(this.extent || this.window)) return;
    event.preventDefault();
    if (zoom) return zoomBy(this, zoom);
    if (!this.extent) return;
    const xs = this.places();
    const now = this.at === undefined || this.at === null ? (by > 0 ? -1 : xs.length) : nearest(xs, this.at);
    moveCursors(xs[Math.min(xs.length - 1, Math.max(0, now + by))]);
  }

  // The cursor is at x; null: nowhere.
  point(x) {
    this.at = x;
    if (!this.extent || !this.cursor) return;
    if (x !== null) return this.read(x);
    fill(this.cursor);
    this.latest();
  }

  line(x) {
    return h("line", { x1: this.X(x), x2: this.X(x), y1: MARGIN.top, y2: this.height - MARGIN.bottom });
  }
}

// series: [{name, colour, points: [[x, mean, low, high]], band: [[x, low, high]]}]
export class LineChart extends Frame {
  static hasLog = true;
  series = [];
  shown = [];
  smoothing = 0;

  set(series, smoothing = this.smoothing) {
    this.series = series.filter((one) => one.points.length);
    this.smoothing = smoothing;
    this.draw();
    return this;
  }

  places() { return this.shown[0].drawn.map(([x]) => x); }
  every() { return this.series.flatMap((one) => one.points.map(([x]) => x)); }
  // For a file: a line for each point that is to be seen.
  rows() { return [["curve", this.xName, "mean", "lowest", "highest"], ...this.shown.flatMap((one) => one.points.map((point) => [one.name, ...point]))]; }

  // What is to be seen of each series: the part that is zoomed into and, with a log scale, what is above 0.
  #seen(one) {
    const smoothed = smooth(one.points, this.smoothing), there = one.points.map((_, i) => i).filter((i) => this.inside(one.points[i][0]));
    const kept = this.log ? there.filter((i) => smoothed[i][1] > 0) : there;
    return { ...one, left: there.length - kept.length, points: kept.map((i) => one.points[i]), drawn: kept.map((i) => smoothed[i]), band: one.band?.filter(([x]) => this.inside(x)) };
  }

  draw() {
    if (!this.width) return;
    const seen = this.series.map((one) => this.#seen(one)), left = seen.reduce((sum, one) => sum + one.left, 0);
    this.shown = seen.filter((one) => one.points.length);
    this.latest();
    this.say(left > 0 && `Log scale: ${left} point${left > 1 ? "s" : ""} at or below 0 not drawn`);
    if (!this.shown.length) return this.empty(!this.series.length ? this.nothing : left ? "no value above 0" : "no point here");
    const values = this.shown.flatMap((one) => [
      ...one.drawn.map(([, y]) => y), ...one.points.flatMap((p) => (this.smoothing ? [p[1]] : p.slice(1))), ...(one.band ?? []).flatMap((p) => p.slice(1)),
    ]).filter((value) => !this.log || value > 0);
    let low = Math.min(...values), high = Math.max(...values);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1;
    [low, high] = this.log ? [low / 1.1, high * 1.1] : [low >= 0 && low < room * 3 ? 0 : low - room, high + room];
    this.scale(this.window ?? this.shown.flatMap((one) => one.points.map(([x]) => x)), low, high);
    this.show(...this.axes(), ...marks(this, this.shown), ...this.shown.flatMap((one) => this.#paths(one)));
  }

  #paths(one) {
    const raw = one.points, path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${this.X(x).toFixed(1)} ${this.Y(y).toFixed(1)}`).join("");
    const area = (points) => `${path(points.map(([x, , , b]) => [x, b]))}${path([...points].reverse().map(([x, , a]) => [x, a])).replace("M", "L")}Z`;
    const band = one.band ? one.band.map(([x, a, b]) => [x, 0, a, b]) : raw;
    const spread = raw.length > 1 && (one.band || !this.smoothing) && band.some((p) => p[3] > p[2]);
    return [
      spread && h("path", { class: `band ${one.colour}`, d: area(band) }),
      this.smoothing && h("path", { class: `raw ${one.colour}`, d: path(raw) }),
      h("path", { class: `line ${one.colour} ${one.dashed ? "dashed" : ""}`, d: path(one.drawn) }),
      ...(raw.length < 13 ? one.drawn.map(([x, y]) => h("circle", { class: one.colour, cx: this.X(x), cy: this.Y(y), r: 2.2 })) : []),
    ].filter(Boolean);
  }

  latest() {
    fill(this.readout, ...this.shown.slice(0, 3).map((one) => h("span", { class: this.series.length > 1 ? `ink ${one.colour}` : "" }, this.format(one.points.at(-1)[1]))));
    fill(this.legend, ...((this.named && this.series.length > 1) || this.series.some((one) => one.about) ? this.series.map((one) => h("span", { class: `ink ${one.colour}`, title: one.about }, one.name)) : []));
  }

  read(x) {
    const found = this.shown.map(({ drawn }) => drawn[nearest(drawn.map((p) => p[0]), x)]);
    fill(this.cursor, this.line(found[0][0]), ...found.map(([px, py], place) => h("circle", { class: this.shown[place].colour, cx: this.X(px), cy: this.Y(py), r: 3 })));
    fill(this.readout, h("span", { class: "muted" }, `${this.xName} ${number(found[0][0])}`), ...found.slice(0, 4).map(([, y], place) =>
      h("span", { class: this.series.length > 1 ? `ink ${this.shown[place].colour}` : "" }, this.format(y))));
  }
}

// rows: [[x, value of each name...]]; parts: [{name, colour}]; share: each row adds up to 1
export class StackChart extends Frame {
  all = [];
  raw = [];

  set(parts, rows, share = false) {
    Object.assign(this, { parts, share, all: rows });
    fill(this.legend, parts.map((part) => h("span", { class: `swatch ${part.colour}` }, part.name)));
    this.draw();
    return this;
  }

  places() { return this.heights.map(([x]) => x); }
  every() { return this.all.map(([x]) => x); }
  rows() { return [[this.xName, ...this.parts.map((part) => part.name)], ...this.raw]; }

  draw() {
    if (!this.width) return;
    this.raw = this.all.filter(([x]) => this.inside(x));
    this.heights = this.raw.map(([x, ...values]) => {
      const sum = this.share ? values.reduce((a, b) => a + b, 0) || 1 : 1;
      return [x, ...values.map((value) => value / sum)];
    });
    this.say();
    if (!this.raw.length) return this.empty(this.all.length ? "no step here" : this.nothing);
    const sums = this.heights.map(([, ...values]) => values.reduce((a, b) => a + b, 0));
    const at = this.places(), half = (from, to) => (at[to] - at[from]) / 2 || 0.5;
    this.edges = [at[0] - half(0, Math.min(1, at.length - 1)), at.at(-1) + half(Math.max(at.length - 2, 0), at.length - 1)];
    this.scale(this.edges, 0, this.share ? 1 : Math.max(...sums) * 1.04 || 1);
    const base = this.heights.map(() => 0), areas = [];
    this.parts.forEach((part, place) => {
      const top = this.heights.map((row, i) => base[i] + row[place + 1]);
      areas.push(h("path", { class: `stack ${part.colour}`, d: this.#area(top, base) }));
      top.forEach((value, i) => (base[i] = value));
    });
    this.show(...areas, ...this.axes());
  }

  // as steps, so that a column is as wide as what it stands for
  #area(top, base) {
    const xs = this.places().map(this.X);
    const left = (i) => (i ? (xs[i - 1] + xs[i]) / 2 : this.X(this.edges[0])), right = (i) => (i < xs.length - 1 ? (xs[i] + xs[i + 1]) / 2 : this.X(this.edges[1]));
    const f = (value) => this.Y(value).toFixed(1);
    const there = top.map((y, i) => `${i ? "L" : "M"}${left(i).toFixed(1)} ${f(y)}L${right(i).toFixed(1)} ${f(y)}`).join("");
    const back = base.map((y, i) => `L${right(i).toFixed(1)} ${f(y)}L${left(i).toFixed(1)} ${f(y)}`).reverse().join("");
    return `${there}${back}Z`;
  }

  latest() { fill(this.readout); }

  read(x) {
    const place = nearest(this.places(), x), row = this.heights[place];
    fill(this.cursor, this.line(row[0]));
    fill(this.readout, h("span", { class: "muted" }, `${this.xName} ${number(row[0])}`), ...this.parts.map((part, i) => row[i + 1] > 0 && h("span", {}, `${part.name} ${this.format(this.raw[place][i + 1])}`)).filter(Boolean));
  }
}

// rows: [{name, colour, spans: [[step, begin, end]]}] one below the other, over seconds
export function lanes(title, rows) {
  const width = 560, left = 68, thick = 17, height = 34 + thick * rows.length, all = rows.flatMap((row) => row.spans), last = Math.max(...all.map(([, , end]) => end), 1e-9);
  const X = (x) => left + (x / last) * (width - left - 12), loop = rows.filter(({ name }) => !["sampling", "scoring"].includes(name));  // those may begin during the step before
  const begins = new Map(loop.flatMap((row) => row.spans).sort((a, b) => b[1] - a[1]));
  const bar = (row, place) => ([step, begin, end]) => h("rect", { class: `stack ${row.colour}`, opacity: step % 2 ? 1 : 0.65, x: X(begin), width: Math.max(X(end) - X(begin), 0.7), y: 17 + thick * place, height: thick - 4 }, h("title", {}, `${row.name}, step ${step}: ${seconds(end - begin)}`));
  return figure(title, null, h("svg", { class: "bars", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title },
    [...begins].map(([step, x]) => [h("line", { class: "grid", x1: X(x), x2: X(x), y1: 2, y2: height - 16 }), h("text", { x: X(x) + 3, y: 10 }, `step ${step}`)]).flat(),
    rows.map((row, place) => [h("text", { x: left - 5, y: 27 + thick * place, "text-anchor": "end" }, row.name), row.spans.map(bar(row, place))]).flat(2),
    niceTicks(0, last, 5).map((x) => h("text", { x: X(x), y: height - 4, "text-anchor": "middle" }, x ? seconds(x) : "0"))));
}

// groups: [{name, colour, values}] side by side over labels
export function bars(title, labels, groups, format = percent1) {
  const most = Math.max(...groups.flatMap((group) => group.values), 1e-9), width = 460, height = 150, left = 38;
  const each = (width - left - 6) / labels.length, thick = Math.min(14, (each - 4) / groups.length);
  const Y = (value) => height - 22 - (value / most) * (height - 34);
  return figure(title, null,
    h("svg", { class: "bars", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title },
      niceTicks(0, most, 3).flatMap((y) => [h("line", { class: "grid", x1: left, x2: width, y1: Y(y), y2: Y(y) }), h("text", { x: left - 5, y: Y(y) + 3, "text-anchor": "end" }, format(y))]),
      labels.map((label, i) => h("text", { x: left + each * (i + 0.5), y: height - 7, "text-anchor": "middle" }, label)),
      groups.flatMap((group, g) => group.values.map((value, i) =>
        h("rect", { class: `stack ${group.colour}`, x: left + each * (i + 0.5) + (g - groups.length / 2) * thick, y: Y(value), width: Math.max(thick - 1, 1), height: Math.max(height - 22 - Y(value), 0) },
          h("title", {}, `${group.name}, ${labels[i]}: ${format(value)}`))))),
    h("div", { class: "legend" }, groups.map((group) => h("span", { class: `swatch ${group.colour}` }, group.name))));
}

const percent1 = (value) => `${(100 * value).toFixed(0)}%`;

// cells: [[column, row, count]] on a grid of columns x rows
export function heat(title, { cells, columns, rows, shortest, longest, lowest, highest }, xName, yName) {
  const width = 460, height = 220, left = 42, bottom = 30, most = Math.max(...cells.map((cell) => cell[2]), 1);
  const w = (width - left - 6) / columns, t = (height - bottom - 8) / rows;
  const square = ([x, y, count]) => h("rect", { class: "cell", x: left + x * w, y: 8 + (rows - 1 - y) * t, width: w + 0.3, height: t + 0.3, "fill-opacity": 0.12 + 0.88 * Math.sqrt(count / most) },
    h("title", {}, `${xName} ${number(shortest + ((longest - shortest) * x) / columns)}…, ${yName} ${number(lowest + ((highest - lowest) * y) / rows)}…: ${number(count)} samples`));
  const marks = [[lowest, height - bottom], [highest, 16]].map(([value, y]) => h("text", { x: left - 5, y, "text-anchor": "end" }, number(value)));
  return figure(title, h("span", { class: "muted" }, " samples of each, darker: more"),
    h("svg", { class: "bars", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, cells.map(square), marks,
      h("line", { class: "axis", x1: left, x2: width - 6, y1: height - bottom + 1, y2: height - bottom + 1 }),
      h("text", { x: left, y: height - 14 }, number(shortest)), h("text", { x: width - 6, y: height - 14, "text-anchor": "end" }, number(longest)),
      h("text", { x: (left + width) / 2, y: height - 14, "text-anchor": "middle" }, xName)));
}

function figure(title, about, ...children) {
  return h("figure", { class: "chart", "data-chart": title }, h("figcaption", {}, h("b", {}, title), about), ...children);
}

function nearest(xs, x) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  return best;
}
