// Blind comparison: which of two answers is better, without knowing whose they are. mount(element, {run}) returns
// {close}.

import { asking, fill, h, labelled, modelChoice, percent, table } from "./dom.js";
import { address, ask } from "./server.js";

const CHOICES = [
  ["left", "Left is better", "ArrowLeft", "←"],
  ["tie", "Equally good", "t", "t"],
  ["both_bad", "Both bad", "b", "b"],
  ["right", "Right is better", "ArrowRight", "→"],
];

// voting(element, run, about, base): about has the models, base is the route of pairs and votes.
export const voting = (element, run, about, base) => asking(element, async (root, ended) =>
  new Comparison(root, run, about, ended, base));

export const mount = (element, api) => asking(element, async (root, ended) =>
  new Comparison(root, api.run, await ask(address("playground", { run: api.run }), undefined, ended), ended));

class Comparison {
  constructor(root, run, about, ended, base = "votes") {
    if (about.models.length < 2) throw new Error("a comparison takes two models; this run has kept fewer");
    Object.assign(this, { run, ended, base, pair: null, next: null, count: 0, round: 0 });
    this.models = [about.models[0].name, about.models.at(-1).name].map((name) => modelChoice(about.models, name));
    this.who = h("input", { type: "text", maxlength: 200, placeholder: "somebody", value: remembered() });
    this.temperature = h("input", { type: "number", min: 0, max: 5, step: "any", value: about.temperature ?? 0, required: true });
    const form = h("form", { class: "controls" },
      labelled("one model", this.models[0]), labelled("another", this.models[1]), about.temperature !== null && labelled("temperature", this.temperature),
      labelled("your name", this.who), h("button", { type: "submit" }, "Compare"),
      h("button", { type: "button", onclick: () => this.result() }, "Show result"));
    form.addEventListener("submit", (event) => { event.preventDefault(); remember(this.who.value); this.begin(); });
    this.status = h("p", { class: "dim", role: "status" }, "Which model is on which side is drawn anew for each prompt, and not told.");
    this.place = h("div", { class: "side" });
    this.table = h("div", { class: "scroll" });
    fill(root, form, this.status, this.place, this.table);
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
    const found = ask(address(`${this.base}/pair`), wanted, this.ended);
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
    const card = (title, text) => h("article", { class: "card", "aria-label": title },
      h("header", {}, h("span", { class: "dim" }, title)), h("pre", { tabindex: 0 }, text));
    const buttons = CHOICES.map(([vote, text, , shown]) => h("button", { type: "button", onclick: () => this.vote(vote) }, `${text} `, h("kbd", {}, shown)));
    this.again = h("button", { type: "button", hidden: true }, "Send the vote again");
    fill(this.place,
      card(held_out ? "prompt, held out" : "prompt, of the training", prompt),
      h("div", { class: "sides" }, card("left", left), card("right", right)),
      h("div", { class: "controls" }, buttons, this.again));
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
    const { pair, round } = this;
    if (!pair) return;
    this.pair = null; // one vote for each
    try {
      await ask(address("votes"), { pair: pair.pair, vote, who: this.who.value }, this.ended);
      this.count += 1;
    } catch (error) {
      if (this.ended.aborted || round !== this.round) return;
      this.say(`this vote is not kept yet: ${error.message}`, "error");
      this.pair = pair;
      this.again.hidden = false;
      this.again.onclick = () => this.vote(vote);
      return;
    }
    if (round !== this.round) return;
    await this.show();
  }

  async result() {
    try {
      const { votes, tallies } = await ask(address(this.base, { run: this.run }), undefined, this.ended);
      if (!votes) return fill(this.table, h("p", { class: "dim" }, "There are no votes yet."));
      fill(this.table, table(
        ["first", "second", "first better", "second better", "tie", "both bad", "second preferred (95% interval)", ""],
        tallies.map((one) => [...one.models, one.first, one.second, one.ties, one.both_bad,
          one.share ? `${percent(one.share.value)} (${percent(one.share.low)} to ${percent(one.share.high)})` : "–", one.verdict])));
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
