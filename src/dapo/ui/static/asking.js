// What the playground and the comparison share: elements, requests, and a list of models.
// Text from a model is put in as text and never as markup.

import { visible } from "./dom.js";

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "textContent") element.textContent = visible(value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

export const labelled = (text, control) => make("label", {}, make("span", { textContent: text }), control);

export function useStyle() {
  const address = new URL("asking.css", import.meta.url).href;
  if (![...document.styleSheets].some((sheet) => sheet.href === address))
    document.head.append(make("link", { rel: "stylesheet", href: address }));
}

export async function request(path, body, signal) {
  const asked = body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  let answer;
  try {
    answer = await fetch(`/api/${path}`, { ...asked, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; is dapo ui still running?");
  }
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    const detail = Array.isArray(told.detail) ? told.detail.map((one) => `${one.loc.at(-1)}: ${one.msg}`).join("; ") : told.detail;
    throw new Error(told.error ?? detail ?? `the server answered ${answer.status}`);
  }
  return answer;
}

export const ask = async (path, body, signal) => (await request(path, body, signal)).json();

// The events of a stream, one by one.
export async function* events(path, body, signal) {
  const answer = await request(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

export function modelChoice(models, chosen) {
  const choice = make("select");
  for (const { name, best } of models)
    choice.append(make("option", { value: name, textContent: best ? `${name} (best)` : name, selected: name === chosen }));
  return choice;
}

export const share = (value) => `${(100 * value).toFixed(value > 0.9995 || value < 0.0005 ? 0 : 1)}%`;
