// What the playground and the comparison share: their style, and a list of models.

import { h } from "./dom.js";

export const labelled = (text, control) => h("label", {}, h("span", {}, text), control);

export function useStyle() {
  const address = new URL("asking.css", import.meta.url).href;
  if (![...document.styleSheets].some((sheet) => sheet.href === address))
    document.head.append(h("link", { rel: "stylesheet", href: address }));
}

export const modelChoice = (models, chosen) =>
  h("select", {}, models.map(({ name, best }) => h("option", { value: name, selected: name === chosen }, best ? `${name} (best)` : name)));
