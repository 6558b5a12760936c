"""Checks of the data: what is in the files, what they share, and how a row reaches the model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dapo.checks import answers
from dapo.checks.context import CheckContext, Finding
from dapo.config import Config
from dapo.data.check import CheckReport, FileReport, Measure, check_data, prompt_identity
from dapo.data.overlap import exact_key
from dapo.data.rows import EATEN, NO_ANSWER
from dapo.data.source import load_prompts, read_prompts
from dapo.data.template import PromptTemplate, carries_instruction, lost_letters
from dapo.environments.player import scores_itself
from dapo.errors import DataError
from dapo.model.loading import context_limit
from dapo.records import Prompt
from dapo.reward.build import needs_answer

READ = 5000  # rows whose text alone is looked at

_LAST_TURN = re.compile(r"^(system|user|assistant): ", re.MULTILINE)
"""How :attr:`Prompt.text` writes who speaks."""
_DOUBTS = {
    EATEN: ("control-characters", "write the rows with a JSON library, which doubles backslashes"),
    NO_ANSWER: ("placeholders", "leave those rows out: a response that says the same would be right"),
}
"""Name and remedy of what may be wrong with rows (:meth:`Row.doubts`)."""
_MEND_ALL = (
    "mend them (JSON lines, a JSON array or Parquet, as UTF-8; one answer a row, as text or a number), or set the "
    "keys as the file has them (data.prompt_key, data.answer_key)"
)
_MEND_OVERLAP = "take them out of data.train: what the evaluation says of them is memory"


def check_rows(context: CheckContext) -> Iterator[Finding]:
    """Every row of every file, as ``dapo data check`` reads them; then the prompts that training draws from."""
    context.need(context.files, "files")
    config, template = context.config, context.template
    data = config.data
    check = config.monitor.check
    context.own_reward |= scores_itself(config)
    needed = (needs_answer(config.reward) and not context.own_reward) or (check is not None and needs_answer(check))
    measure = Measure()
    if template is not None:
        measure = Measure(lambda: template, prompt_identity(data, config.model.tokenizer or config.model.path))
    try:
        found = check_data(data.train, config.evaluation.data, data, measure, answer_required=needed)
    except DataError as error:
        yield Finding("data", "files", "fail", str(error), "dapo data check FILES says what is in a file")
        return
    repeated = () if config.environment.on else _repeated_rows(found, config)  # other keys tell rows apart, too
    troubles = [*_bad_rows(found, config, context.own_reward), *repeated]
    yield from troubles
    failed = any(one.status == "fail" for one in troubles)
    if not failed:
        rows = sum(report.rows for report in found.train)
        held_out = sum(report.rows for report in found.evaluation)
        reports, lengths = [report for report in found.train if report.lengths.unit == "tokens"], ""
        if reports:
            median = max(report.lengths.at(0.5) for report in reports)
            lengths = f"; prompts of {median} tokens (median) to {_longest(reports)}"
        text = f"{rows:,} to train on, {held_out:,} to evaluate on, every one read{lengths}"
        yield Finding("data", "rows", "pass", text)
    near = sum(pair.near for pair in found.overlap)
    if found.evaluation and not sum(pair.exact for pair in found.overlap):
        also = f"; {near:,} share 13 words in a row with one (dapo data check shows them)" if near else ""
        yield Finding("data", "overlap", "pass", f"no row to train on holds a prompt that is evaluated on{also}")
    if template is not None:
        yield from _load(context, template, needed, already=failed)


def _longest(reports: Sequence[FileReport]) -> int:
    return max(report.lengths.at(1.0) for report in reports)


def _told(name: str, count: int, text: str, fix: str, fails: bool = False) -> Iterator[Finding]:
    if count:
        yield Finding("data", name, "fail" if fails else "warn", text, fix)


def _bad_rows(found: CheckReport, config: Config, own_reward: bool) -> Iterator[Finding]:
    """Rows that cannot be used, or hold what they should not."""
    data, train, held_out = config.data, found.train, found.evaluation
    rows, bad = sum(report.rows for report in train), sum(report.bad for report in train)
    text = f"data.train: {bad:,} of {rows:,} rows cannot be used, such as {_first_fault(train)}"
    fails = data.on_bad_row == "fail" or bad > data.max_bad_rows * rows
    yield from _told("bad-rows", bad, text, _MEND_ALL if bad == rows else "mend them, or data.on_bad_row=skip", fails)
    bad_held_out = sum(report.bad for report in held_out)
    text = f"evaluation.data: {bad_held_out:,} rows cannot be used, such as {_first_fault(held_out)}"
    yield from _told("bad-rows", bad_held_out, text, "mend them: an evaluation leaves no row out", True)
    for key, reports in (("data.train", train), ("evaluation.data", held_out)):
        for what, (name, fix) in _DOUBTS.items():
            told = [report.doubts[what] for report in reports if what in report.doubts]
            count = sum(number for number, _ in told)
            first = "".join(example for _, examples in told[:1] for example in examples[:1])
            yield from _told(name, count, f"{key}: {count:,} rows {what}, such as {first}", fix)
    unanswered = sum(report.missing_answers for report in train) if bad < rows and not own_reward else 0
    text = f"data.train: {unanswered:,} of {rows:,} rows have no answer under {data.answer_key!r}; the reward gets None"
    yield from _told("answers", unanswered, text, "data.answer_key=KEY, if the file calls it otherwise")
    if too_long := sum(report.too_long or 0 for report in train):
        text = f"{too_long:,} of {rows:,} prompts are longer than data.max_prompt_length={data.max_prompt_length} and "
        text += "left out"
        fix = f"data.max_prompt_length={_longest(train)} takes them all"
        yield from _told("too-long", too_long, text, fix, fails=too_long == rows - bad)


def _repeated_rows(found: CheckReport, config: Config) -> Iterator[Finding]:
    train, rows = found.train, sum(report.rows for report in found.train)
    conflicts = sum(r.conflicts for r in train) + sum(pair.conflicts for pair in found.between)
    example = f", such as {found.conflicts[0]}" if found.conflicts else ""
    text = f"{conflicts:,} rows repeat the prompt of an earlier row with another answer{example}"
    fix = f"data.prompt_key, now {config.data.prompt_key!r}: is it the key of the question?"
    fix = "keep one row of each; dapo data check lists them" if conflicts < rows / 2 else fix
    yield from _told("conflicts", conflicts, text, fix)
    repeated = sum(r.duplicates for r in train) + sum(pair.exact for pair in found.between) - conflicts
    text = f"{repeated:,} of {rows:,} rows repeat the prompt of an earlier row"
    yield from _told("duplicates", repeated, text, "keep one row of each, unless they are to be drawn more often")
    exact = sum(pair.exact for pair in found.overlap)
    example = found.overlap[0].examples[0] if exact else ""
    text = (
        f"{exact:,} of {rows:,} rows to train on ({exact / max(rows, 1):.1%}) hold a prompt that is evaluated on, such "
    )
    text += f"as {example}"
    yield from _told("overlap", exact, text, _MEND_OVERLAP)


def _first_fault(reports: Sequence[FileReport]) -> str:
    return next((report.faults[0] for report in reports if report.faults), "")


def check_overlap(context: CheckContext) -> Iterator[Finding]:
    """Whether rows that were looked at are evaluated on. Of a recipe :func:`check_rows` compares whole files, but for
    rows of an environment, which other keys than the prompt tell apart."""
    on = context.config.environment.on
    if not context.heldout or not (context.at_start or on):
        return

    def key(prompt: Prompt) -> tuple[int, str]:
        others = json.dumps([prompt.answer, prompt.meta], sort_keys=True, default=str) if on else ""
        return exact_key(prompt.text), others

    trained = {key(prompt) for prompt in context.need(context.source, "tokenized data").untokenized()}
    both = [prompt for prompt in context.heldout if key(prompt) in trained]
    text = (
        f"{len(both):,} of {len(context.heldout):,} rows to evaluate on ({len(both) / len(context.heldout):.1%}) are "
    )
    text += f"to be trained on, too, such as row {both[0].row + 1}: {both[0].text[:60]!r}" if both else ""
    yield from _told("overlap", len(both), text, _MEND_OVERLAP)


# --- the prompts that are drawn from ------------------------------------------------------------------------------


def _load(context: CheckContext, template: PromptTemplate, needed: bool, already: bool) -> Iterator[Finding]:
    """Make what later checks draw from. Bad rows have been told of, and hide nothing else: they are skipped here."""
    config = context.config
    lenient = config.data.model_copy(update={"on_bad_row": "skip", "max_bad_rows": 1.0})
    try:
        source = load_prompts(lenient, config.data.train, template, seed=config.seed, answer_required=needed)
        if items := config.evaluation.data:
            limit = config.evaluation.rows
            context.heldout = read_prompts(config.data, items, template, answer_required=needed, limit=limit)
    except DataError as error:
        if not already:
            yield Finding("data", "rows", "fail", str(error))
        return
    context.source = source
    report, wanted = source.report, config.rollout.prompts_per_step
    if report.whole and report.usable < wanted and not already:
        whole = report.usable // config.training.groups_per_update * config.training.groups_per_update
        fix = f"rollout.prompts_per_step={whole or report.usable}" + ("" if whole else " training.groups_per_update=1")
        text = f"{report.usable} usable prompts are fewer than one step needs (rollout.prompts_per_step={wanted})"
        yield Finding("data", "rows", "fail", text, f"{fix}, or more data")


def check_sample(context: CheckContext) -> Iterator[Finding]:
    """A prompt as the model will see it, unless a training shows it anyway, and what is odd about the prompts."""
    source, tokenizer = context.need(context.source, "tokenized data"), context.tokenizer
    prompts = answers.spread(source.prompts, answers.LOOKED_AT)
    if not context.at_start:
        first = prompts[0]
        special = Counter(i for i in first.token_ids if i in tokenizer.all_special_ids)
        said = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)}={i}" for i in special) or "none"
        answer = "" if first.answer is None else f", answer {first.answer[:60]!r}"
        text = f"{context.need(context.template, 'template').show(first)} ({len(first.token_ids)} tokens, "
        yield Finding("data", "prompt", "pass", f"{text}special ones: {said}{answer})")
    yield from _odd_prompts(context, prompts)


def _odd_prompts(context: CheckContext, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    tokenizer, config = context.tokenizer, context.config
    markers = [text for text in tokenizer.all_special_tokens if len(text) > 2]
    marked = [(p, text) for p in prompts for text in markers if text in p.text]
    if marked:
        prompt, text = marked[0]
        rows, plain = len({p.row for p, _ in marked}), config.data.template == "plain"
        yield answers.data_warning(
            "special-tokens",
            f"{rows} of {len(prompts)} rows hold special tokens as text, such as {text!r} in row {prompt.row + 1}: "
            + ("the model reads them as marks, not as text" if plain else "they were put through a template before"),
            f"take them out of the rows, {'unless they are meant so' if plain else 'or data.template=plain'}",
        )
    lost = [(p, letters) for p in prompts if (letters := lost_letters(p.text, tokenizer.decode(list(p.token_ids))))]
    if lost:
        prompt, letters = lost[0]
        told = f"{len(lost)} of {len(prompts)} rows hold letters that the tokenizer has no token for, such as "
        told += f"{''.join(letters)!r} in row {prompt.row + 1}"
        fix = "model.tokenizer=FOLDER of the model's own tokenizer, or mend the rows"
        yield answers.data_warning("unknown-tokens", told, fix)
    yield from _written_before(config, prompts)
    yield from answers.check_content(answers.with_keys(config, config.data.train), prompts)
    if not context.own_reward:  # of which is not known what it compares with
        heldout = answers.spread(context.heldout, answers.LOOKED_AT)
        for finding in answers.check_content(answers.with_keys(config, config.evaluation.data), heldout):
            yield replace(finding, found=f"evaluation.data: {finding.found}")
    positions = None if context.shape is None else context_limit(context.shape.config)
    yield from answers.check_room(config, prompts, tokenizer, positions)
    everything = list(context.need(context.source, "tokenized data").untokenized())
    yield from answers.check_given_away(config, answers.spread(everything, READ))
    yield from _answer_format(context, prompts)


def _written_before(config: Config, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    instruction = config.data.instruction.strip()
    asking = [p for p in prompts if carries_instruction(p.text)] if instruction else []
    twice = [p for p in asking if not carries_instruction(p.text, instruction)]
    if len(twice) > len(prompts) / 2 and config.data.template != "dapo":
        text = f"{len(twice)} of {len(prompts)} prompts ask for a line 'Answer: $Answer' by themselves, such as row "
        text += f"{twice[0].row + 1}: the model reads data.instruction beside it"
        yield answers.data_warning("instruction", text, "data.instruction=''")
    answered = [p for p in prompts if _LAST_TURN.findall(p.text)[-1:] == ["assistant"]]
    if len(answered) > len(prompts) / 2:
        text = f"{len(answered)} of {len(prompts)} chats end in what the assistant says, such as row "
        text += f"{answered[0].row + 1}: {answered[0].text[-60:]!r}; the model would answer that"
        fix = f'take the last message off the rows: row["{config.data.prompt_key}"].pop()'
        yield answers.data_warning("last-turn", text, fix)


def _answer_format(context: CheckContext, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    reward = context.config.reward
    if reward.kind != "math" or context.own_reward:
        return
    words = {"boxed": "boxed", "answer_line": "answer:"}
    seen = [context.tokenizer.decode(list(p.token_ids)).lower() for p in prompts[:20]]
    asked = [text for text in seen if any(words[rule] in text for rule in reward.extract)]
    if not asked:
        works = "data.template=dapo" if "answer_line" in reward.extract else "data.instruction=' Put it in \\boxed{}.'"
        text = 'no prompt asks for the form that reward.kind=math reads (the last \\boxed{} or an "Answer:" line)'
        yield answers.data_warning("answer-format", text, works)
