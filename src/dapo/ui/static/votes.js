// Blind comparison: which of two answers is better, without knowing whose they are. mount(element, {run}) returns
// {close}.

import { ask, labelled, make, modelChoice, share, useStyle } from "./asking.js";

const CHOICES = [
  ["left", "Left is better", "ArrowLeft", "←"],
  ["tie", "Equally good", "t", "t"],
  ["both_bad", "Both bad", "b", "b"],
  ["right", "Right is better", "ArrowRight", "→"],
];

export function mount(element, api) {
  useStyle();
  const ended = new AbortController();
  const root = make("div", { className: "asking" }, make("p", { className: "dim", textContent: "looking at the models ..." }));
  element.replaceChildren(root);
  ask(`playground?run=${encodeURIComponent(api.run)}`, undefined, ended.signal)
    .then((about) => new Comparison(root, api.run, about, ended.signal))
    .catch((error) => {
      if (!ended.signal.aborted) root.replaceChildren(make("p", { className: "error", role: "alert", textContent: error.message }));
    });
  return { close: () => ended.abort() };
}

class Comparison {
  constructor(root, run, about, ended) {
    if (about.models.length < 2) throw new Error("a comparison takes two models; this run has kept fewer");
    Object.assign(this, { run, ended, pair: null, next: null, count: 0, round: 0 });
    this.models = [about.models[0].name, about.models.at(-1).name].map((name) => modelChoice(about.models, name));
    this.who = make("input", { type: "text", maxLength: 200, placeholder: "somebody", value: remembered() });
    this.temperature = make("input", { type: "number", min: 0, max: 5, step: "any", value: about.temperature, required: true });
    const form = make("form", { className: "controls" },
      labelled("one model", this.models[0]), labelled("another", this.models[1]), labelled("temperature", this.temperature),
      labelled("your name", this.who), make("button", { type: "submit", textContent: "Compare" }),
      make("button", { type: "button", textContent: "Show result", onclick: () => this.result() }));
    form.addEventListener("submit", (event) => { event.preventDefault(); remember(this.who.value); this.begin(); });
    this.status = make("p", { className: "dim", role: "status",
      textContent: "Which model is on which side is drawn anew for each prompt, and not told." });
    this.place = make("div", { className: "side" });
    this.table = make("div", { className: "scroll" });
    root.replaceChildren(form, this.status, this.place, this.table);
    document.addEventListener("keydown", (event) => this.key(event), { signal: ended });
  }

  say(text, kind = "dim") {
    [this.status.textContent, this.status.className] = [text, kind];
  }

  begin() {
    this.round += 1; // what was asked for before is of other settings
    this.next = null;
    this.table.replaceChildren();
    return this.show();
  }

  fetch(skip) {
    const wanted = { run: this.run, models: this.models.map((choice) => choice.value), who: this.who.value,
      temperature: this.temperature.valueAsNumber, skip };
    const found = ask("votes/pair", wanted, this.ended);
    found.catch(() => {}); // whoever waits for it hears of it
    return found;
  }

  async show() {
    const round = this.round;
    this.pair = null;
    this.place.replaceChildren();
    this.say("both are answering ...");
    try {
      const pair = await (this.next ?? this.fetch([]));
      if (round !== this.round) return;
      this.pair = pair;
      this.next = this.fetch([pair.row]); // answered while this one is read
    } catch (error) {
      if (round === this.round && !this.ended.aborted) this.say(error.message, "error");
      this.next = null;
      return;
    }
    const { prompt, left, right, held_out, same, rows_left } = this.pair;
    const card = (title, text) => make("article", { className: "card", ariaLabel: title },
      make("header", {}, make("span", { className: "dim", textContent: title })), make("pre", { tabIndex: 0, textContent: text }));
    const buttons = CHOICES.map(([vote, text, , shown]) => make("button", { type: "button", onclick: () => this.vote(vote) },
      `${text} `, make("kbd", { textContent: shown })));
    this.place.replaceChildren(
      card(held_out ? "prompt, held out" : "prompt, of the training", prompt),
      make("div", { className: "sides" }, card("left", left), card("right", right)),
      make("div", { className: "controls" }, buttons));
    const alike = same ? `; ${same} with the same answer twice left out` : "";
    this.say(`votes cast: ${this.count}; prompts left: ${rows_left}${alike}`);
  }

  key(event) {
    if (!this.pair || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input, select, textarea, [role=tablist], [contenteditable]")) return;
    const found = CHOICES.find(([, , key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    this.vote(found[0]);
  }

  async vote(vote) {
    const { pair } = this.pair ?? {};
    if (!pair) return;
    this.pair = null; // one vote for each
    try {
      await ask("votes", { pair, vote, who: this.who.value }, this.ended);
      this.count += 1;
    } catch (error) {
      if (!this.ended.aborted) this.say(error.message, "error");
      return;
    }
    await this.show();
  }

  async result() {
    try {
      const { votes, tallies } = await ask(`votes?run=${encodeURIComponent(this.run)}`, undefined, this.ended);
      if (!votes) return this.table.replaceChildren(make("p", { className: "dim", textContent: "There are no votes yet." }));
      const cells = (tag, texts) => make("tr", {}, texts.map((text) => make(tag, { textContent: text })));
      this.table.replaceChildren(make("table", {},
        make("thead", {}, cells("th", ["first", "second", "first better", "second better", "tie", "both bad", "second preferred (95% interval)", ""])),
        make("tbody", {}, tallies.map((one) => cells("td", [...one.models, one.first, one.second, one.ties, one.both_bad,
          one.share ? `${share(one.share.value)} (${share(one.share.low)} to ${share(one.share.high)})` : "–", one.verdict])))));
    } catch (error) {
      if (!this.ended.aborted) this.say(error.message, "error");
    }
  }
}

const NAME = "dapo.who";
function remembered() {
  try { return localStorage.getItem(NAME) ?? ""; } catch { return ""; }
}
function remember(name) {
  try { localStorage.setItem(NAME, name); } catch { /* not kept, then */ }
}
