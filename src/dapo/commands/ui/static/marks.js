// Vertical lines where settings of a run were changed, each with its words as a tooltip.

import { h } from "./dom.js";

// frame: with X, line and extent; series: each may have marks [[x, text]]
export const marks = (frame, series) => series.flatMap(({ marks = [], name, colour }) => marks
  .filter(([x]) => frame.inside(x))
  .map(([x, text]) => h("g", { class: `mark ${colour}`, stroke: "currentColor", "stroke-dasharray": "1 3" },
    h("title", {}, series.length > 1 ? `${name}, ${text}` : text), frame.line(x),
    h("rect", { x: frame.X(x) - 5, width: 11, height: frame.height, fill: "transparent", stroke: "none" }))));  // wide enough to point at
