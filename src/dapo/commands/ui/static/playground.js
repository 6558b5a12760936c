// Two models of a run answer one prompt, side by side, as they write. mount(element, {run}) returns {close}.

import { asking, fill, h, labelled, modelChoice, percent } from "./dom.js";
import { address, ask, events } from "./server.js";

export const mount = (element, api) => asking(element, (root, ended) => start(root, api.run, ended));

async function start(root, run, ended) {
  const about = await ask(address("playground", { run }), undefined, ended);
  if (!about.models.length) throw new Error("this run has kept no model yet");
  const questions = await ask(address("questions", { run, count: 200 }), undefined, ended)
    .catch((error) => ({ questions: [], error: error.message }));
  const form = controls(about, questions);
  const status = h("p", { class: "dim", role: "status" },
    `Answers are judged by this run's own reward (${about.reward}), which runs on the machine that serves this page.`);
  const sides = h("div", { class: "sides tall" });
  fill(root, form.element, status, sides);
  let going = null;
  const stop = () => going?.abort();
  ended.addEventListener("abort", stop);
  form.stop.addEventListener("click", stop);
  form.element.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (going) return;
    going = new AbortController();
    form.busy(true);
    status.className = "dim";
    const wanted = { run, ...form.wanted() };
    const shown = wanted.models.map((name) => new Side(name));
    sides.replaceChildren(...shown.map((side) => side.element));
    try {
      await follow(wanted, shown, status, going.signal);
    } catch (error) {
      const stopped = error.name === "AbortError";
      status.textContent = stopped ? "stopped" : error.message;
      status.className = stopped ? "dim" : "error";
    } finally {
      going = null;
      form.busy(false);
    }
  });
}

async function follow(wanted, sides, status, signal) {
  status.textContent = "asking ...";
  for await (const event of events(address("playground"), wanted, signal)) {
    if (event.event === "error") throw new Error(event.message);
    if (event.event === "status") status.textContent = `${event.message} ...`;
    if (event.event === "tokens") sides[event.side].write(event);
    if (event.event === "sample") sides[event.side].finish(event);
    if (event.event === "done") status.textContent = `done in ${event.seconds} s`;
  }
}

function controls(about, found) {
  const models = [about.models[0].name, about.models.at(-1).name].map((name) => modelChoice(about.models, name));
  const pick = h("select", {}, h("option", { value: "" }, "a prompt of my own"),
    found.questions.map(({ row, prompt }) => h("option", { value: String(row) }, short(prompt))));
  const prompt = h("textarea", { spellcheck: "false", required: true });
  const answer = h("input", { type: "text", placeholder: "for the verdict" });
  const samples = h("input", { type: "number", min: 1, max: about.max_samples, value: 4, required: true });
  const temperature = h("input", { type: "number", min: 0, max: 5, step: "any", value: about.temperature, required: true });
  const tokens = h("input", { type: "number", min: 1, max: about.max_tokens, value: about.max_tokens, required: true });
  const seed = h("input", { type: "number", min: 0, max: 4294967295, value: 0, required: true });
  const go = h("button", { type: "submit" }, "Ask both");
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const take = () => {
    const one = found.questions.find(({ row }) => String(row) === pick.value);
    if (one) [prompt.value, answer.value] = [one.prompt, one.answer ?? ""];
  };
  const own = () => { pick.value = ""; };
  pick.addEventListener("change", take);
  prompt.addEventListener("input", own);
  answer.addEventListener("input", own);
  const another = h("button", {
    type: "button", disabled: !found.questions.length,
    onclick: () => { pick.selectedIndex = 1 + Math.floor(Math.random() * found.questions.length); take(); },
  }, "Another");
  if (found.questions.length) [pick.selectedIndex] = [1];
  take();
  const where = found.held_out === undefined ? found.error : found.held_out ? "held-out rows" : "prompts of the training";
  const element = h("form", { class: "controls" },
    labelled("left", models[0]), labelled("right", models[1]), labelled("samples of each", samples),
    labelled("temperature", temperature), labelled("tokens at most", tokens), labelled("seed", seed),
    labelled(`prompt, from ${where}`, pick), another, labelled("reference answer", answer),
    h("label", { class: "broad" }, h("span", {}, "prompt"), prompt), go, stop);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element.requestSubmit();
  });
  return {
    element, stop,
    busy: (is) => { go.disabled = is; stop.disabled = !is; },
    wanted: () => ({
      models: models.map((choice) => choice.value), samples: samples.valueAsNumber, temperature: temperature.valueAsNumber,
      max_tokens: tokens.valueAsNumber, seed: seed.valueAsNumber,
      ...(pick.value ? { row: Number(pick.value) } : { prompt: prompt.value, answer: answer.value || null }),
    }),
  };
}

const short = (text) => (text.length > 80 ? `${text.slice(0, 79)}…` : text);

class Side {
  constructor(name) {
    this.cards = new Map();
    this.summary = h("span", { class: "dim" });
    this.verdicts = [];
    this.list = h("div", { class: "side" });
    this.element = h("section", { class: "side", "aria-label": name }, h("h3", {}, h("span", {}, `${name} `), this.summary), this.list);
  }

  card(index) {
    if (!this.cards.has(index)) {
      this.cards.set(index, new Card(index));
      this.list.replaceChildren(...[...this.cards].sort(([a], [b]) => a - b).map(([, card]) => card.element));
    }
    return this.cards.get(index);
  }

  write({ index, start, tokens }) {
    this.card(index).write(start, tokens);
  }

  finish(sample) {
    this.card(sample.index).finish(sample);
    this.verdicts.push(sample.verdict.correct);
    const known = this.verdicts.filter((correct) => correct !== null);
    if (known.length) this.summary.textContent = `${known.filter(Boolean).length} of ${known.length} right`;
  }
}

class Card {
  constructor(index) {
    this.tokens = [];
    this.here = -1;
    this.head = h("header", {}, h("span", { class: "dim" }, `#${index + 1}, writing`));
    this.text = h("pre", { tabindex: 0, "aria-label": `answer ${index + 1}; arrows go through its tokens` });
    this.readout = h("p", { class: "told", role: "status" });
    this.element = h("article", { class: "card" }, this.head, this.text, this.readout);
    this.text.addEventListener("mouseover", ({ target }) => this.tell([...this.text.children].indexOf(target)));
    this.text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.tell(Math.min(Math.max(this.here + step, 0), this.tokens.length - 1));
    });
  }

  write(start, tokens) {
    this.tokens.splice(start, tokens.length, ...tokens);
    while (this.text.children.length > start) this.text.lastChild.remove();
    this.text.append(...tokens.map(([text, probability]) => {
      const token = h("span", { class: "token" }, text);
      // the less likely, the stronger
      token.style.backgroundColor = `rgb(230 130 30 / ${Math.min(0.65, 0.8 * (1 - probability))})`;
      return token;
    }));
  }

  tell(place) {
    const token = this.tokens[place];
    if (!token) return;
    this.text.children[this.here]?.classList.remove("here");
    this.here = place;
    this.text.children[place].classList.add("here");
    const [text, probability, best] = token;
    const others = (best ?? []).filter(([other]) => other !== text || !text).slice(0, 4).map(([other, p]) => `${quoted(other)} ${percent(p)}`);
    this.readout.textContent = `${quoted(text)} ${percent(probability)}${others.length ? `; likely here: ${others.join(", ")}` : ""}`;
  }

  finish({ index, tokens, length, finish_reason, verdict }) {
    this.write(0, tokens);
    const [word, kind] = verdict.correct === null ? ["no verdict", "dim"] : verdict.correct ? ["right", "right"] : ["wrong", "wrong"];
    const facts = [`#${index + 1}`, `${length} tokens${finish_reason === "length" ? ", cut" : ""}`];
    if (verdict.reward !== null) facts.push(`reward ${Number(verdict.reward.toFixed(4))}`);
    if (verdict.extracted !== null) facts.push(`found ${short(verdict.extracted)}`);
    if (verdict.error) facts.push(verdict.error);
    fill(this.head, h("span", { class: kind }, word), facts.map((text) => h("span", { class: "dim" }, text)));
  }
}

const quoted = (text) => (text ? JSON.stringify(text) : "(no text)");
