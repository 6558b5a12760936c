// What can be done with a chart besides looking at it: scale, zoom, a picture or its numbers as a file.

import { fill, h } from "./dom.js";
import { zoomBy, zoomTo } from "./zoom.js";

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "fill-opacity", "font-size", "font-family", "font-weight"];
const TITLE = 24, LINE = 16;  // pixels of the title above the picture, and of a line of the legend below

export function save(name, content, type = "text/plain") {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: `${type};charset=utf-8` }));
  h("a", { href: address, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const cell = (value) => { const text = String(value ?? ""); return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
export const csv = (rows) => rows.map((row) => row.map(cell).join(",") + "\r\n").join("");

// The picture in a figure by itself: with the colours as they are now, title and legend.
function picture(figure, title) {
  const svg = figure.querySelector("figure > svg, .plot svg"), { width, height } = svg.viewBox.baseVal;
  const copy = (element) => {
    const found = element.cloneNode(false), style = getComputedStyle(element);
    found.removeAttribute("class");
    for (const name of STYLES) found.setAttribute(name, style.getPropertyValue(name));
    found.append(...[...element.childNodes].filter((child) => child.classList?.contains("cursor") !== true).map((child) => (child instanceof Element ? copy(child) : child.cloneNode())));
    return found;
  };
  const { color, fontFamily } = getComputedStyle(figure), words = { fill: color, "font-family": fontFamily };
  let x = 8, y = TITLE + height + 12;
  const legend = [...figure.querySelectorAll(".legend > span")].flatMap((one) => {
    const wide = 24 + 6.4 * one.textContent.length;
    if (x + wide > width && x > 8) [x, y] = [8, y + LINE];
    x += wide;
    return [h("rect", { x: x - wide, y: y - 8, width: 9, height: 9, fill: getComputedStyle(one, "::before").backgroundColor }), h("text", { ...words, x: x - wide + 14, y, "font-size": 11 }, one.textContent)];
  });
  const whole = legend.length ? y + 8 : TITLE + height;
  return [h("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: whole, viewBox: `0 0 ${width} ${whole}` },
    h("rect", { width, height: whole, fill: getComputedStyle(document.documentElement).getPropertyValue("--panel") }),
    h("text", { ...words, x: 8, y: 16, "font-size": 13, "font-weight": 600 }, title),
    h("g", { transform: `translate(0 ${TITLE})` }, [...copy(svg).childNodes]), legend), width, whole];
}

async function asPng([svg, width, height]) {
  const image = new Image(), canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
  await image.decode();
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done));
}

// A menu for a chart with {element, title} and, if it can be zoomed and has numbers, what the charts of charts.js have.
export function toolsOf(chart) {
  const name = () => `${document.title.split(" · ").at(-1)} ${chart.title}`, drawn = () => picture(chart.element, chart.title);
  const act = (text, work) => h("button", { type: "button", onclick: async () => { try { await work(); } catch (error) { fill(chart.said ?? menu, error.message); } menu.open = false; } }, text);
  const menu = h("details", {
    class: "tools",
    onkeydown: (event) => { if (event.key === "Escape") { menu.open = false; menu.firstChild.focus(); } },
    onfocusout: (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; },
  }, h("summary", { "aria-label": `tools for ${chart.title}`, title: "zoom, scale, save" }, "⋯"), h("div", {},
    chart.set && [["zoom in", () => zoomBy(chart, 0.5)], ["zoom out", () => zoomBy(chart, 2)], ["show all", () => zoomTo(chart, null)]].map((one) => act(...one)),
    chart.useLog && h("label", {}, h("input", { type: "checkbox", onchange: (event) => chart.useLog(event.target.checked) }), "log scale"),
    act("save SVG", () => save(`${name()}.svg`, new XMLSerializer().serializeToString(drawn()[0]), "image/svg+xml")),
    act("save PNG", async () => save(`${name()}.png`, await asPng(drawn()))),
    chart.set && act("save CSV", () => save(`${name()}.csv`, csv(chart.rows()), "text/csv"))));
  return menu;
}
