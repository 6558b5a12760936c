// Groups side by side: what was asked, what was answered, what it earned, why it was trained on or not.

import { fill, folded, h, highlight, note, number, panel, percent, segmented } from "../dom.js";
import { save, saveCsv } from "../tools.js";

const LEVELS = 8, MOST_SAVED = 10_000;
const level = (share) => Math.max(0, Math.min(LEVELS, Math.round(share * LEVELS)));
const COLOURINGS = {
  none: { name: "plain", class: () => "" },
  advantage: { name: "advantage", scale: ["−2", "0", "+2"], both: true, class: (token) => signed(token.advantage / 2) },
  probability: { name: "probability", scale: ["sure", "unlikely"], needs: "logprob_engine", class: (token) => `n${level(1 - Math.exp(token.logprob_engine))}` },
  gap: { name: "engine–trainer gap", scale: ["≤1e-4", "≥1 nat"], needs: "logprob_trainer", class: (token) => `n${level((Math.log10(Math.max(Math.abs(token.logprob_engine - token.logprob_trainer), 1e-4)) + 4) / 4)}` },
  entropy: { name: "entropy", scale: ["0", "≥3 nats"], needs: "entropy", class: (token) => `p${level(token.entropy / 3)}` },
};
const signed = (share) => (share >= 0 ? "p" : "n") + level(Math.abs(share ?? 0));

export async function mount(element, api) {
  const wanted = { order: "newest", ...api.params };
  delete wanted.draw;
  const list = h("div", { class: "panel list", role: "listbox", "aria-label": "groups", tabindex: -1 });
  const detail = h("div", { class: "detail" }), count = h("span", { class: "muted", role: "status" });
  const fresh = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => { fresh.hidden = true; told(load()); } });
  let groups = [], total = 0, open = api.params.draw ? `${api.params.at ?? api.params.step}/${api.params.draw}` : null, colouring = api.params.colour ?? "advantage", known = null;

  const keep = () => api.keep({ ...wanted, ...(open ? { at: open.split("/")[0], draw: open.split("/")[1] } : {}), colour: colouring });
  const query = () => {
    const { step, at, colour, draw, correct, longer_than, text, ...rest } = wanted;
    return { ...rest, run: api.run, correct, longer_than, first_step: step, last_step: step };
  };
  const change = (name, value) => {
    if (value === "" || value === false) delete wanted[name];
    else wanted[name] = value;
    open = null;
    told(load());
  };
  const told = (work) => work.catch((error) => fill(detail, h("p", { class: "problem", role: "alert" }, error.message)));

  let turn = 0, loading = 0;  // an answer that comes after a later question is dropped
  async function load(offset = 0) {
    const mine = ++loading;
    turn += 1;
    const found = await api.get("groups", { ...query(), offset });
    if (mine !== loading) return;
    turn += 1;
    known = found;
    groups = offset ? [...groups, ...found.groups] : found.groups;
    total = offset ? total : found.total;
    count.textContent = found.samples ? `${number(total)} group${total === 1 ? "" : "s"}; ${number(found.samples)} samples in steps ${found.first} to ${found.last}` : "";
    drawList();
    const first = groups.find((group) => key(group) === open) ?? (open ? null : groups[0]);
    if (first && !offset) await show(first);
    else if (open && !offset) await show({ step: open.split("/")[0], draw: open.split("/")[1] });
    else if (!groups.length) fill(detail, note(found.samples ? "No group is like this. Take a filter away." : api.running ? "No group yet." : "This run has stored no samples."));
  }

  function drawList() {
    const rows = groups.map((group) => h("div", { role: "option", "aria-selected": String(key(group) === open), tabindex: key(group) === open ? 0 : -1, "data-key": key(group), onclick: () => told(show(group)) },
      h("span", { class: "prompt" }, group.prompt || "(text is gone)"),
      h("span", { class: "dots", title: `${group.right} of ${group.scored} right` }, group.verdicts.slice(0, 32).map((right) => h("i", { class: right === null ? "" : right ? "right" : "wrong" }))),
      h("span", { class: `tag ${group.status === "kept" ? "good" : ""}` }, group.status.replaceAll("_", " ")),
      h("span", { class: "muted" }, `step ${group.step} · row ${group.row}`),
      h("span", { class: "muted" }, `${number(group.length)} tok${group.truncated ? `, ${group.truncated} cut` : ""}`)));
    const more = groups.length < total && h("button", { type: "button", class: "more", onclick: () => told(load(groups.length)) }, `${number(total - groups.length)} more`);
    fill(list, rows, more);
    if (rows.length && !rows.some((row) => row.tabIndex === 0)) rows[0].tabIndex = 0;
    list.onkeydown = (event) => {
      const here = rows.indexOf(document.activeElement), to = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: rows.length - 1 }[event.key];
      if (event.key === "Enter" && here >= 0) return detail.querySelector(".tokens")?.focus();
      if (to === undefined || here < 0 || !rows[to]) return;
      event.preventDefault();
      rows[to].focus();
      told(show(groups[to]));
    };
  }

  async function show(group) {
    const mine = ++turn;
    open = key(group);
    for (const row of list.querySelectorAll("[role=option]")) {
      const here = row.dataset.key === open;
      row.setAttribute("aria-selected", String(here));
      row.tabIndex = here ? 0 : -1;
    }
    keep();
    const found = await api.get("group", { run: api.run, step: group.step, draw: group.draw });
    if (mine !== turn) return;
    const light = () => highlight(detail.querySelectorAll(".prompt-box, .tokens"), wanted.text?.toLowerCase())?.scrollIntoView({ block: "nearest" });
    const draw = () => {
      fill(detail, drawGroup(found, colouring, (name) => { colouring = name; keep(); light(); }, more, wanted.text));
      light();
    };
    const more = async (sample) => {  // of a group that is too large to come whole
      try {
        Object.assign(sample, await api.get("sample", { run: api.run, step: found.step, draw: found.draw, sample: sample.sample }), { whole: true });
      } catch (error) {
        Object.assign(sample, { tokens: {}, response: error.message });
      }
      if (mine === turn) draw();
    };
    draw();
  }

  const finds = h("div", { class: "finds" }), searched = h("div", { class: "muted", role: "status" });
  let asked = 0;
  async function find(next, last) {
    const mine = ++asked, { text } = wanted;
    if (!next) [finds, searched].forEach((place) => fill(place));
    if (!text) return highlight([]);
    searched.textContent = "searching …";
    const found = await api.get("search", { run: api.run, text, step: next?.[0], skip: next?.[1] }).catch((error) => ({ error }));
    if (mine !== asked) return;
    if (found.error) return fill(searched, found.error.message);
    finds.append(...found.finds.map((one) => h("a", { href: api.href("groups", { ...wanted, at: one.step, draw: one.draw }), onclick: (event) => { event.preventDefault(); told(show(one)); } },
      h("span", { class: "muted" }, `step ${one.step}, draw ${one.draw}, ${one.where === "prompt" ? "prompt" : `${one.where} ${one.sample}`}: `), one.before, h("mark", {}, one.found), one.after)));
    last ??= found.last;
    fill(searched, found.searched ? `${finds.childElementCount} found in the texts of steps ${found.first} to ${last}. ` : "No texts are stored. ",
      found.next && h("button", { type: "button", onclick: () => find(found.next, last) }, `search on: ${number(found.left)} more step${found.left === 1 ? "" : "s"}`));
  }
  async function saveGroups(type) {
    let all = [], found;
    do all = all.concat((found = await api.get("groups", { ...query(), limit: 200, offset: all.length })).groups);
    while (found.groups.length && all.length < Math.min(found.total, MOST_SAVED));
    if (type === "csv") saveCsv(`${api.run} groups`, [Object.keys(all[0] ?? {}), ...all.map(Object.values)]);
    else save(`${api.run} groups.jsonl`, all.map((group) => `${JSON.stringify(group)}\n`).join(""), "application/jsonl");
    count.textContent = `${number(all.length)} of ${number(found.total)} groups saved`;
  }

  const control = (name, input) => h("label", {}, name, input);
  const integer = (name, label, placeholder) => control(label, h("input", { type: "number", min: 0, max: 2 ** 31 - 1, value: wanted[name] ?? "", placeholder, "aria-label": label, name, onchange: (event) => event.target.reportValidity() && change(name, event.target.value) }));
  const choose = (name, label, options) => control(label, h("select", { "aria-label": label, name, onchange: (event) => change(name, event.target.value) }, options.map(([value, text]) => h("option", { value, selected: (wanted[name] ?? options[0][0]) === value }, text))));
  const box = (name, label) => h("label", {}, h("input", { type: "checkbox", name, checked: wanted[name] === "true", onchange: (event) => change(name, event.target.checked ? "true" : "") }), label);
  const statuses = ["kept", "all_right", "all_wrong", "flat", "too_few_scored", "surplus", "carried", "stale"];
  fill(element,
    h("div", { class: "bar" },
      integer("step", "step", "all"),
      choose("status", "status", [["", "any"], ...statuses.map((name) => [name, name.replaceAll("_", " ")])]),
      choose("correct", "has a sample", [["", "any"], ["true", "right"], ["false", "wrong"]]),
      integer("longer_than", "longer than", "tokens"), integer("row", "row", "any"),
      box("truncated", "cut"), box("failed", "score failed"), box("disagree", "check disagrees"),
      choose("order", "order", [["newest", "newest"], ["hardest", "hardest"], ["easiest", "easiest"], ["longest", "longest"], ["spread", "spread of reward"], ["gap", "engine–trainer gap"]]),
      count, fresh, ["csv", "jsonl"].map((type) => h("button", { type: "button", class: "quiet", onclick: () => told(saveGroups(type)) }, `save ${type}`))),
    h("div", { class: "bar" }, h("input", { type: "search", value: wanted.text ?? "", placeholder: "search prompts, responses, answers", "aria-label": "search texts", maxlength: 200, onchange: (event) => { wanted.text = event.target.value; keep(); find(); } }), searched), finds,
    h("div", { class: "split" }, list, detail));
  await load();
  find();
  return {
    refresh({ type }) {
      if (type !== "samples") return;
      if (!groups.length) return load();
      fresh.hidden = false;
      fresh.textContent = "there are new samples: show";
    },
  };
}

const key = (group) => `${group.step}/${group.draw}`;

function drawGroup(group, colouring, choose, more, text) {
  const reading = h("div", { class: "reading muted", role: "status" }, "Point at a token, or focus a text and use the arrow keys.");
  const scale = h("span", { class: "scale" }), cards = h("div", { class: "cards" });
  const has = (name) => group.samples.some((sample) => sample.tokens[name]?.some((value) => value !== null));
  const offered = Object.entries(COLOURINGS).map(([id, one]) => [id, one.name, one.needs && !has(one.needs) ? (group.whole ? "not computed for this group" : "open a sample first") : undefined, Boolean(one.needs && !has(one.needs))]);
  if (offered.find(([id]) => id === colouring)?.[3]) colouring = "advantage";
  const opener = (sample) => !group.whole && !sample.whole && h("button", { type: "button", onclick: (event) => { event.target.disabled = true; more(sample); } }, `Open all ${number(sample.length)} tokens`);
  const paint = (id) => {
    const one = COLOURINGS[id];
    const swatches = one.both ? ["n8", "n5", "n2", "p2", "p5", "p8"] : (one.class({ logprob_engine: -5, logprob_trainer: 0, entropy: 3 }) || "n")[0] === "p" ? ["p1", "p3", "p5", "p8"] : ["n1", "n3", "n5", "n8"];
    fill(scale, one.scale && [one.scale[0], h("span", {}, swatches.map((name) => h("i", { class: name }))), one.scale.at(-1)]);
    fill(cards, group.samples.map((sample) => drawSample(sample, one, reading, opener(sample), text)));
  };
  paint(colouring);
  const samples = group.samples, right = samples.filter((sample) => sample.correct).length, scored = samples.filter((sample) => sample.correct !== null).length;
  return panel(null,
    h("div", { class: "bar" }, h("b", {}, `Step ${group.step}, draw ${group.draw}`), h("span", { class: "muted" }, `row ${group.row}`),
      h("span", { class: `tag ${group.status === "kept" ? "good" : "warm"}` }, `${group.status.replaceAll("_", " ")}: ${group.why}`),
      h("span", {}, `${right} of ${scored} right`), h("span", {}, "answer ", h("code", {}, group.gold ?? "–"))),
    h("pre", { class: "prompt-box" }, folded(group.prompt ?? "(the text is gone)", text && group.prompt?.toLowerCase().includes(text.toLowerCase()) ? Infinity : undefined)),
    h("div", { class: "bar" }, segmented("colour of the tokens", offered, colouring, (id) => { paint(id); choose(id); }), scale),
    cards, reading);
}

const ENDS = { done: "ended", max_turns: "had all its turns", max_tokens: "had all tokens that it, or its last turn, may have", timeout: "took too long", died: "its environment failed" };

function drawSample(sample, colouring, reading, opener, text) {
  const turns = sample.turns && [sample, ...sample.more].flatMap((sequence) => sequence.turns);
  const mark = sample.correct === null ? ["?", "muted"] : sample.correct ? ["✓", "good"] : ["✗", "warm"];
  const differs = sample.check_correct !== null && sample.check_correct !== sample.correct;
  const facts = Object.entries(sample.parts ?? {}).map(([name, value]) => h("span", {}, `${name} ${number(value)}`));
  const mean = (name, text, format = number) => sample[name] !== null && sample[name] !== undefined && h("span", {}, `${text} ${format(sample[name])}`);
  return h("article", { class: "card", "data-sample": sample.sample },
    h("header", {},
      h("b", { class: mark[1], title: sample.correct ? "right" : "wrong" }, `${mark[0]} ${sample.extracted ?? (sample.correct === null ? "no verdict" : sample.correct ? "right" : "wrong")}`),
      h("span", {}, h("span", { class: "muted" }, "reward "), number(sample.reward)),
      h("span", {}, h("span", { class: "muted" }, "advantage "), number(sample.advantage)),
      h("span", { class: "muted" }, turns ? `${sample.sampled} tok of the model's` : `${sample.length} tok`),
      turns ? h("span", { class: `tag ${sample.ended === "done" ? "" : "warm"}` }, `${turns.length} turn${turns.length === 1 ? "" : "s"}, ${ENDS[sample.ended] ?? sample.ended}`)
        : sample.finish_reason === "length" && h("span", { class: "tag warm" }, "cut"),
      differs && h("span", { class: "tag warm" }, `check: ${sample.check_correct ? "right" : "wrong"}`),
      sample.status === "kept" && !sample.in_loss && h("span", { class: "tag" }, "not in the loss"),
      sample.error && h("span", { class: "tag warm", title: sample.error }, "score failed")),
    [sample, ...(sample.more ?? [])].map((sequence) => drawTokens(sequence, turns?.indexOf(sequence.turns[0]) ?? 0, sample, colouring, reading, text)),
    opener,
    sample.tokens.pieces?.length < sample.length && note(`The first ${number(sample.tokens.pieces.length)} of its tokens.`),
    h("footer", {}, h("span", {}, `#${sample.sample}`), sample.shaped_reward !== null && sample.shaped_reward !== sample.reward && h("span", {}, `shaped ${number(sample.shaped_reward)}`), facts,
      mean("logprob_engine", "mean logprob"), mean("entropy", "entropy"), mean("gap_max", "largest gap"),
      sample.version_first !== null && h("span", {}, sample.version_first === sample.version_last ? `policy ${sample.version_first}` : `policies ${sample.version_first}–${sample.version_last}`)));
}

const STOPS = { tool_calls: "calls a tool", malformed: "its call cannot be read", length: "cut, not in the loss" };

// Of a response its tokens; of an episode those of the model under a head for each turn, and what the environment said.
function drawTokens(sequence, before, sample, colouring, reading, text) {
  const { pieces, ...numbers } = sequence.tokens, units = pieces ?? [...(sequence.response ?? "(the text is gone)")];
  const advantage = ([, , stop, , own]) => (stop === "length" ? 0 : own ?? sample.advantage);
  const token = (place, turn) => ({ advantage: advantage(turn) ?? 0, ...Object.fromEntries(["logprob_engine", "logprob_trainer", "entropy"].map((name) => [name, numbers[name]?.[place] ?? null])) });
  const unfolded = (words, most) => folded(words, text && words.toLowerCase().includes(text.toLowerCase()) ? Infinity : most);
  const cells = [], body = [before > 0 && h("span", { class: "turn" }, "from here on with a beginning of its own, as earlier turns were rewritten"), sequence.opening && h("span", { class: "theirs" }, unfolded(sequence.opening, 240))];
  const cell = (from, to, turn) => {
    const words = units.slice(from, to).join(""), painted = turn && (pieces || colouring.both) ? colouring.class(token(from, turn)) : "";
    cells.push({ element: h("span", { class: turn ? `${pieces ? "tok" : ""} ${painted}` : "tok theirs" }, turn ? words : unfolded(words)), from, to, turn });
    body.push(cells.at(-1).element);
  };
  let at = 0;
  for (const [index, turn] of (sequence.turns ?? [[0, units.length, null, 0, null, [0, units.length]]]).entries()) {
    const [from, to] = pieces ? turn : turn[5], [, , stop, reward, own] = turn;
    if (from > at) cell(at, from);
    if (sequence.turns) body.push(h("span", { class: "turn" }, [`turn ${before + index + 1}`, STOPS[stop], reward && `reward ${number(reward)}`, own !== null && `advantage ${number(own)}`].filter(Boolean).join(" · ")));
    for (let place = from; place < to; place += pieces ? 1 : to) cell(place, pieces ? place + 1 : to, turn);
    at = to;
  }
  if (at < units.length) cell(at, units.length);
  let here = -1;
  const read = (index) => {
    cells[here]?.element.classList.remove("at");
    here = Math.max(0, Math.min(cells.length - 1, index));
    cells[here].element.classList.add("at");
    cells[here].element.scrollIntoView?.({ block: "nearest" });
    say(cells[here]);
  };
  const say = ({ from, to, turn }) => {
    if (!turn) return fill(reading, `tokens ${from + 1} to ${to} of ${units.length} · of the environment`);
    const now = token(from, turn), facts = [`token ${to} of ${units.length}`];
    if (now.logprob_engine !== null) facts.push(`probability ${percent(Math.exp(now.logprob_engine))}`, `engine ${now.logprob_engine.toFixed(4)}`);
    if (now.logprob_trainer !== null) facts.push(`trainer ${now.logprob_trainer.toFixed(4)}`, `gap ${number(Math.abs(now.logprob_engine - now.logprob_trainer))}`);
    if (now.entropy !== null) facts.push(`entropy ${now.entropy.toFixed(3)}`);
    facts.push(turn[2] === "length" ? "not in the loss" : `advantage ${number(advantage(turn))}`);
    fill(reading, h("code", {}, JSON.stringify(units[from])), "  ", facts.join(" · "));
  };
  return h("pre", {
    class: "tokens", tabindex: 0, "aria-label": `sample ${sample.sample}`,
    onpointerover: (event) => { const found = pieces && cells.find(({ element }) => element === event.target); if (found) say(found); },
    onkeydown: (event) => { const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key]; if (by && pieces) { event.preventDefault(); read(here + by); } },
    onblur: () => { cells[here]?.element.classList.remove("at"); here = -1; },
  }, body);
}
