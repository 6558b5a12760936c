// The recipe, key by key, and where several runs differ.

import { fill, h, note, panel, table } from "../dom.js";
import { shown } from "./overview.js";

export async function mount(element, api) {
  const found = await api.get("config", { run: api.runs });
  const several = api.runs.length > 1, differing = new Set(found.differing);
  let only = several && api.params.all !== "true", changed = false, text = "";
  const standard = (key, place) => found.defaults[place]?.[key] ?? null;
  const isSet = (key, place) => found.defaults[place] && JSON.stringify(found.values[key][place]) !== JSON.stringify(standard(key, place));
  const anySet = (key) => api.runs.some((_, place) => isSet(key, place)), unknown = api.runs.filter((_, place) => !found.defaults[place]);
  const value = (key) => (one, place) => h("td", { class: `value ${several && differing.has(key) ? "differs" : ""}` }, shown(one),
    isSet(key, place) && h("span", { class: "set" }, key in found.defaults[place] ? `default ${shown(standard(key, place))}` : "no default"));
  const body = h("div"), count = h("span", { class: "muted", role: "status" });

  function draw() {
    const keys = Object.keys(found.values).filter((key) => (!only || differing.has(key)) && (!changed || anySet(key)) && key.includes(text));
    count.textContent = several ? `${differing.size} of ${Object.keys(found.values).length} keys differ` : `${keys.length} keys, ${keys.filter(anySet).length} not at their default`;
    const sections = Map.groupBy(keys, (key) => (key.includes(".") ? key.split(".")[0] : ""));
    fill(body, keys.length ? [...sections].map(([section, names]) => panel(section || null, table(["key", ...(several ? api.runs : ["value"])], names.map((key) => [
      h("td", { class: "value key" }, section ? key.slice(section.length + 1) : key), ...found.values[key].map(value(key))])))) : note(only && !text && !changed ? "These runs have the same recipe." : "No key is like this."));
  }
  fill(element, h("div", { class: "bar" },
    h("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys", oninput: (event) => { text = event.target.value.trim(); draw(); } }),
    several && h("label", {}, h("input", { type: "checkbox", checked: only, onchange: (event) => { only = event.target.checked; draw(); } }), "differences only"),
    h("label", {}, h("input", { type: "checkbox", onchange: (event) => { changed = event.target.checked; draw(); } }), "not the default"), count,
    unknown.length > 0 && note(`Of another version of dapo, so its defaults are not known: ${unknown.join(", ")}`),
    !several && h("span", { class: "muted" }, "Tick a second run to compare them.")), body);
  draw();
}
