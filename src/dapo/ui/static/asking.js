// What the playground and the comparison share.

import { h } from "./dom.js";

export const labelled = (text, control) => h("label", {}, h("span", {}, text), control);

export const modelChoice = (models, chosen) =>
  h("select", {}, models.map(({ name, best }) => h("option", { value: name, selected: name === chosen }, best ? `${name} (best)` : name)));
