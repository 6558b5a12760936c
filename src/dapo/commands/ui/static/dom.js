// Making elements. Text becomes text nodes, never markup, so a response that holds HTML is shown as it is.

const HIDDEN = /[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;

// Text with an escape for what a browser would hide or obey: control characters, and marks that turn the text around.
export const visible = (text) => String(text).replace(HIDDEN, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);
const there = (children) => children.flat().filter((child) => child !== null && child !== undefined && child !== false)
  .map((child) => (child instanceof Node ? child : visible(child)));

const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "path", "line", "rect", "circle", "text", "g", "title"]);

export function h(tag, properties = {}, ...children) {
  const element = IN_SVG.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...there(children));
  return element;
}

// What is in its place already stays there, and keeps the focus.
export function fill(element, ...children) {
  const wanted = there(children), now = element.childNodes;
  if (wanted.length !== now.length || wanted.some((child, place) => child !== now[place])) element.replaceChildren(...wanted);
  return element;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 1) return value.toFixed(2);
  if (size >= 1e-3) return value.toFixed(3);
  return value.toExponential(1);
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1).replace("100.0", "100")}%`);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}

// Time left of a run that goes on, and how it is known.
export function remaining({ seconds: left, since, steps, pace, of, by }) {
  const late = since > Math.max(3 * pace, 60);
  const how = `${steps} more step${steps === 1 ? "" : "s"}${by === "minutes" ? " fit into training.minutes" : ""}, ${seconds(pace)} each in the last ${of}`;
  return [!steps ? "nothing" : late ? "?" : seconds(Math.max(0, left - since)), late ? `${how}; none for ${seconds(since)}` : how];
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) [value, place] = [value / 1024, place + 1];
  return `${value.toFixed(place ? 1 : 0)} ${units[place]}`;
}

export const formatOf = (unit) => ({ share: percent, probability: percent, seconds, bytes })[unit] ?? number;

// One of several choices, as buttons; arrows move between them.
export function segmented(label, choices, chosen, choose) {
  const buttons = choices.map(([value, text, title, disabled]) =>
    h("button", {
      type: "button", role: "radio", "aria-checked": String(value === chosen), title, disabled,
      tabindex: value === chosen ? 0 : -1, onclick: () => pick(value),
    }, text));
  const pick = (value) => {
    choices.forEach(([other], place) => {
      buttons[place].setAttribute("aria-checked", String(other === value));
      buttons[place].tabIndex = other === value ? 0 : -1;
    });
    choose(value);
  };
  return h("span", { class: "segmented", role: "radiogroup", "aria-label": label, onkeydown: roving(buttons) }, buttons);
}

// Arrow keys, Home and End move the focus along elements and click what they reach.
export function roving(elements) {
  return (event) => {
    const open = elements.filter((element) => !element.disabled);
    const here = open.indexOf(document.activeElement);
    const to = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: open.length - 1 }[event.key];
    if (to === undefined || here < 0) return;
    event.preventDefault();
    const next = open[(to + open.length) % open.length];
    next.focus();
    next.click();
  };
}

export function table(head, rows, properties = {}) {
  return h("div", { class: "scroll" }, h("table", { class: "data", ...properties },
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell ?? "–"))))))));
}

// A long text as its beginning and its end; a click shows it whole.
export function folded(text, most = 600) {
  if (text.length <= most) return text;
  const letters = [...text], opener = h("button", { type: "button", class: "fold", onclick: () => fill(opener.parentNode, text) }, `… all ${number(text.length)} characters …`);
  return [letters.slice(0, most / 3).join(""), opener, letters.slice((-most * 2) / 3).join("")];
}

// Mark a text, in lower case, wherever it stands in some elements, which stay what they are. The first place of it.
export function highlight(elements, text) {
  const ranges = [];
  for (const element of text ? elements : []) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), nodes = [], all = element.textContent.toLowerCase();
    for (let start = 0; walker.nextNode(); start += walker.currentNode.length) nodes.push([walker.currentNode, start]);
    const place = (at) => { const [node, start] = nodes.findLast(([, from]) => from <= at); return [node, at - start]; };
    for (let at = all.indexOf(text); at >= 0 && ranges.length < 500; at = all.indexOf(text, at + text.length)) {
      ranges.push(new Range());
      ranges.at(-1).setStart(...place(at));
      ranges.at(-1).setEnd(...place(at + text.length));
    }
  }
  globalThis.CSS.highlights?.set("found", new Highlight(...ranges));
  return ranges[0]?.startContainer.parentElement;
}

export const note = (...text) => h("p", { class: "note" }, ...text);

export const panel = (title, ...children) =>
  h("section", { class: "panel" }, title && h("h2", {}, title), ...children);

// What the playground and the comparison share: start(root, signal) fills a view, and what goes wrong is told in it.
export function asking(element, start) {
  const ended = new AbortController(), root = h("div", { class: "asking" }, h("p", { class: "dim" }, "looking at the models ..."));
  element.replaceChildren(root);
  start(root, ended.signal).catch((error) => ended.signal.aborted || fill(root, h("p", { class: "error", role: "alert" }, error.message)));
  return { close: () => ended.abort() };
}

export const labelled = (text, control) => h("label", {}, h("span", {}, text), control);

export const modelChoice = (models, chosen) =>
  h("select", {}, models.map(({ name, best }) => h("option", { value: name, selected: name === chosen }, best ? `${name} (best)` : name)));
