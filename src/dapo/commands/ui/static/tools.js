// What can be done with a chart besides looking at it: zoom, scale, its numbers as a file.

import { h } from "./dom.js";
import { zoomBy } from "./zoom.js";

export function save(name, content, type) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  h("a", { href: address, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// a text that a spreadsheet would take for a formula gets a quote in front, as these programs do themselves
const cell = (value) => {
  const text = typeof value === "string" && /^[=+@\t-]/.test(value) ? `'${value}` : String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
export const saveCsv = (name, rows) => save(`${name}.csv`, rows.map((row) => `${row.map(cell).join(",")}\r\n`).join(""), "text/csv;charset=utf-8");

// A menu for a chart of charts.js.
export function toolsOf(chart) {
  const name = () => `${document.title.split(" · ").at(-1)} ${chart.title}`;
  const acts = [["zoom in", () => zoomBy(chart, 0.5)], ["zoom out", () => zoomBy(chart, 2)], ["show all", () => zoomBy(chart, Infinity)], ["save CSV", () => saveCsv(name(), chart.rows())]];
  const close = () => { menu.open = false; };
  const menu = h("details", { class: "tools", onkeydown: (event) => event.key === "Escape" && close(menu.firstChild.focus()), onfocusout: (event) => menu.contains(event.relatedTarget) || close() },
    h("summary", { "aria-label": `tools for ${chart.title}`, title: "zoom, scale, save" }, "⋯"), h("div", {},
      chart.constructor.hasLog && h("label", {}, h("input", { type: "checkbox", onchange: (event) => { chart.log = event.target.checked; chart.draw(); } }), "log scale"),
      acts.map(([text, act]) => h("button", { type: "button", onclick: () => { act(); close(); } }, text))));
  return menu;
}
