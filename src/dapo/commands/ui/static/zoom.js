// Zooming along the horizontal axis; all charts of a view that have the same one go together.

import { eachChart } from "./charts.js";
import { h } from "./dom.js";

const CLICK = 5;  // pixels that a pointer may move without meaning a range

// Show [from, to] of the axis; null: all of it.
export function zoomTo(chart, range) {
  eachChart((other) => other.xName === chart.xName && (other.window = range, other.draw()));
  chart.zoomed?.();
}

// A part of what is shown, or several times as much, around the cursor; Infinity: all.
export function zoomBy(chart, factor) {
  if (factor === Infinity) return zoomTo(chart, null);
  if (!chart.extent) return;
  const { x0, x1 } = chart.extent, middle = chart.at ?? (x0 + x1) / 2, [from, to] = [x0, x1].map((x) => middle + (x - middle) * factor);
  zoomTo(chart, chart.every().every((x) => x >= from && x <= to) ? null : [from, to]);
}

export function watchZoom(chart) {
  const { plot } = chart, range = h("rect", { class: "range", y: 0, height: chart.height });
  let begun = null;
  const on = (type, act) => plot.addEventListener(type, act), forget = () => { begun = null; range.remove(); };
  const draw = ({ clientX }) => {
    range.setAttribute("x", Math.min(begun, clientX) - plot.getBoundingClientRect().left);
    range.setAttribute("width", Math.abs(begun - clientX));
  };
  on("pointerdown", (event) => {
    if (!chart.extent || event.button) return;
    begun = event.clientX;
    plot.setPointerCapture(event.pointerId);
    plot.firstChild.append(range);
  });
  on("pointermove", (event) => begun !== null && draw(event));
  on("pointercancel", forget);
  on("pointerup", ({ clientX }) => {
    const ends = [begun, clientX].sort((a, b) => a - b), meant = begun !== null && ends[1] - ends[0] >= CLICK && chart.extent;
    forget();
    if (meant) zoomTo(chart, ends.map((x) => chart.placeOf(x)));
  });
  on("dblclick", () => zoomTo(chart, null));
}
