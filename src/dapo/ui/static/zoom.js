// Zooming along the horizontal axis; all charts of a view that have the same one go together.

import { eachChart } from "./charts.js";
import { h } from "./dom.js";

const CLICK = 5;  // pixels that a pointer may move without meaning a range

// Show [from, to] of the axis; null: all of it.
export function zoomTo(chart, range) {
  eachChart((other) => other.xName === chart.xName && (other.window = range, other.draw()));
  chart.zoomed?.();
}

// A part of what is shown, or several times as much, around the cursor.
export function zoomBy(chart, factor) {
  if (!chart.extent) return;
  const { x0, x1 } = chart.extent, middle = chart.at ?? (x0 + x1) / 2, range = [middle - (middle - x0) * factor, middle + (x1 - middle) * factor];
  zoomTo(chart, factor > 1 && chart.shows(range) ? null : range);
}

export function watchZoom(chart) {
  const { plot } = chart;
  let begun = null;
  const ends = (event) => [begun.x, event.clientX].sort((a, b) => a - b), left = () => plot.getBoundingClientRect().left;
  plot.addEventListener("pointerdown", (event) => {
    if (!chart.extent || event.button) return;
    begun = { x: event.clientX, mark: h("rect", { class: "range", y: 0, height: chart.height }) };
    plot.setPointerCapture(event.pointerId);
    plot.querySelector("svg").append(begun.mark);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!begun) return;
    begun.mark.setAttribute("x", ends(event)[0] - left());
    begun.mark.setAttribute("width", ends(event)[1] - ends(event)[0]);
  });
  for (const type of ["pointerup", "pointercancel"]) plot.addEventListener(type, (event) => {
    if (!begun) return;
    const [from, to] = ends(event);
    begun.mark.remove();
    begun = null;
    if (type === "pointerup" && to - from >= CLICK && chart.extent) zoomTo(chart, [from, to].map((x) => chart.placeOf(x)));
  });
  plot.addEventListener("dblclick", () => zoomTo(chart, null));
  plot.addEventListener("keydown", (event) => {
    const act = { "+": () => zoomBy(chart, 0.5), "=": () => zoomBy(chart, 0.5), "-": () => zoomBy(chart, 2), 0: () => zoomTo(chart, null) }[event.key];
    if (act && !event.ctrlKey && !event.metaKey) act(event.preventDefault());
  });
}
