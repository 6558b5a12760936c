// What can be done with a chart besides looking at it: zoom, scale, a picture or its numbers as a file.

import { h } from "./dom.js";
import { zoomBy } from "./zoom.js";

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "fill-opacity", "font-size", "font-family", "text-anchor"];
const TITLE = 24, LINE = 16;  // pixels of the title above the picture, and of a line of the legend below

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

// The picture in a figure by itself, with the colours as they are now, a title and the legend: {svg, width, height}.
function picture(figure, title) {
  const drawn = figure.querySelector(".plot svg, svg.bars"), { width, height } = drawn.viewBox.baseVal, copy = drawn.cloneNode(true);
  const [from, to] = [drawn, copy].map((svg) => [...svg.querySelectorAll("*")]), words = { fill: getComputedStyle(figure).color, "font-family": getComputedStyle(figure).fontFamily };
  from.forEach((element, place) => STYLES.forEach((name) => to[place].setAttribute(name, getComputedStyle(element).getPropertyValue(name))));
  copy.querySelector(".cursor")?.remove();
  let x = 8, y = TITLE + height + 12;
  const legend = [...figure.querySelectorAll(".legend > span")].flatMap((one) => {
    const wide = 24 + 6.4 * one.textContent.length;
    [x, y] = x + wide > width && x > 8 ? [8 + wide, y + LINE] : [x + wide, y];
    return [h("rect", { x: x - wide, y: y - 8, width: 9, height: 9, fill: getComputedStyle(one, "::before").backgroundColor }), h("text", { ...words, x: x - wide + 14, y, "font-size": 11 }, one.textContent)];
  });
  const whole = legend.length ? y + 8 : TITLE + height, back = getComputedStyle(figure.closest(".panel") ?? figure).backgroundColor;
  const svg = h("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: whole, viewBox: `0 0 ${width} ${whole}` }, h("rect", { width, height: whole, fill: back }),
    h("text", { ...words, x: 8, y: 16, "font-size": 13, "font-weight": 600 }, title), h("g", { transform: `translate(0 ${TITLE})` }, [...copy.childNodes]), legend);
  return { svg: new XMLSerializer().serializeToString(svg), width, height: whole };
}

async function savePng(name, { svg, width, height }) {
  const image = new Image(), canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(`${name}.png`, blob, "image/png"));
}

// A menu for a chart of charts.js; of one that is drawn but once, only {element, title}.
export function toolsOf(chart) {
  const name = () => `${document.title.split(" · ").at(-1)} ${chart.title}`, drawn = () => picture(chart.element, chart.title);
  const acts = chart.draw ? [["zoom in", () => zoomBy(chart, 0.5)], ["zoom out", () => zoomBy(chart, 2)], ["show all", () => zoomBy(chart, Infinity)], ["save CSV", () => saveCsv(name(), chart.rows())]] : [];
  acts.push(["save SVG", () => save(`${name()}.svg`, drawn().svg, "image/svg+xml")], ["save PNG", () => savePng(name(), drawn())]);
  const close = () => { menu.open = false; };
  const menu = h("details", { class: "tools", onkeydown: (event) => event.key === "Escape" && close(menu.firstChild.focus()), onfocusout: (event) => menu.contains(event.relatedTarget) || close() },
    h("summary", { "aria-label": `tools for ${chart.title}`, title: "zoom, scale, save" }, "⋯"), h("div", {},
      chart.constructor.hasLog && h("label", {}, h("input", { type: "checkbox", onchange: (event) => { chart.log = event.target.checked; chart.draw(); } }), "log scale"),
      acts.map(([text, act]) => h("button", { type: "button", onclick: () => { act(); close(); } }, text))));
  return menu;
}
