"""Checks of the reference answers: what they hold, whether a response has room for them, and whether a prompt gives
them away."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from dapo.checks.context import Finding
from dapo.config import CodeReward, Config, ExactReward
from dapo.config.data import DataItem
from dapo.config.reading import with_values
from dapo.data.parts import keys_of
from dapo.records import Prompt
from dapo.util.terminal import visible

T = TypeVar("T")

LOOKED_AT = 200  # rows that are looked at for what takes a look at each of them

_MARKER = re.compile(r"#+\s*|<answer>\s*")
"""What data sets put in front of a final answer, and neither reward takes off a reference."""
_CUE = re.compile(
    r"(?:\b(?:answer|solution|result|gold|label)\b[ \t]*(?:is\b|are\b|[=:])|assistant:|####|<answer>|\\boxed\{|[?\n])"
    r"[\s*_$\"'`(:]*$",
    re.IGNORECASE,
)
_END = re.compile(r"[\s*_$\"'`).}]*+(?:</answer>[\s.]*+)?")
_STRAY = 1000
"""One row in so many may end in its answer by accident: counted over the sets of math and code in ../shared, 8 rows of
10,000 do at most, nearly all of them mistakes of the set."""
_LONG_SOLUTIONS = 0.1  # share of worked solutions without room that is told: a model may well be shorter than they are


def data_warning(name: str, found: str, fix: str) -> Finding:
    return Finding("data", name, "warn", found, fix)


def marker_of(answer: str | None) -> str | None:
    """``#### `` or the like, which stands in front of a final answer that should be bare."""
    found = _MARKER.match(answer.strip()) if answer else None
    return found[0] if found else None


def strip_marker(config: Config, marker: str) -> str:
    key = config.data.answer_key
    end = '.removesuffix("</answer>")' if marker.startswith("<") else ""
    does = f'take it off the rows (no key does): row["{key}"] = row["{key}"].removeprefix("{marker}"){end}'
    if isinstance(config.reward, ExactReward) and config.reward.after is None:
        does += f"; reward.after='{marker.strip()}' looks for it in the response"
    return does


def named(prompts: Sequence[Prompt]) -> str:
    shown = ", ".join(str(prompt.row + 1) for prompt in prompts[:5])
    more = f" and {len(prompts) - 5:,} more" if len(prompts) > 5 else ""
    return f"{'row' if len(prompts) == 1 else 'rows'} {shown}{more}"


def spread(items: Sequence[T], count: int) -> list[T]:
    """Some of the items, such as prompts, from all over them; all if they are no more than ``count``."""
    total = len(items)
    return [items[k * total // count] for k in range(count)] if total > count else list(items)


def doubts_about(config: Config, item: DataItem, prompts: Sequence[Prompt]) -> list[str]:
    """What :func:`check_content` has to say of one file's rows, each in a line that names the file."""
    found = check_content(with_keys(config, [item]), spread(prompts, LOOKED_AT))
    return [visible(f"{item.path}: {one.found}; to do: {one.fix}") for one in found]


def with_keys(config: Config, items: Sequence[DataItem]) -> Config:
    """With the keys of the first of the items, if there are any, as those of the data, so that advice names them."""
    if not items:
        return config
    keys = keys_of(items[0], config.data, answer_required=False)
    return with_values(config, {"data.prompt_key": keys.prompt, "data.answer_key": keys.answer})


def check_content(config: Config, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Answers that are all the same, or more than an answer."""
    answers = {p.answer.strip() for p in prompts if p.answer is not None}
    reward, key = config.reward, config.data.answer_key
    if len(answers) == 1 and len(prompts) > 3 and reward.kind != "code":
        found = f"all of {len(prompts)} rows looked at have the same answer, {answers.pop()[:60]!r}"
        yield data_warning("answers", found, f"data.answer_key, now {key!r}: is it the key of the answer?")
        return
    if reward.kind not in ("math", "exact"):
        return
    marked = [p for p in prompts if marker_of(p.answer)]
    marker = (marker_of(marked[0].answer) or "") if marked else ""
    # what the reward's own check finds by itself is left to it: no answer is right, or none can be read
    silent = marker.startswith("<") if reward.kind == "math" else isinstance(reward, ExactReward) and not reward.after
    if len(marked) > len(prompts) / 2 and silent:
        found = f"{len(marked)} of {len(prompts)} answers begin with {marker!r}, such as row {marked[0].row + 1}: "
        found += f"{(marked[0].answer or '')[:60]!r}; a response with the answer alone would be wrong"
        yield data_warning("answers", found, strip_marker(config, marker))
        return
    long = [p for p in prompts if p.answer is not None and (len(p.answer) > 100 or "####" in p.answer.strip()[1:])]
    if len(long) > len(prompts) / 2 and not marked:
        cut = f': row["{key}"] = row["{key}"].rpartition("####")[2].strip()' if "####" in (long[0].answer or "") else ""
        text = f"{len(long)} of {len(prompts)} answers are whole solutions, such as row {long[0].row + 1}: "
        text += f"{(long[0].answer or '')[-60:]!r}; reward.kind={reward.kind} compares with the final answer alone"
        fix = f"keep only the final answer in the rows{cut}, or name the key that holds it (data.answer_key)"
        yield data_warning("answers", text, fix)
        return


def check_given_away(config: Config, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Prompts that end in their own answer, or hold the worked solution. A number that is part of a question is
    neither; an answer of four letters and more is in most prompts by no accident. Token ids may be left out."""
    key = _solution_key(config)
    shown = [p for p in prompts if _holds(p.text, p.meta.get(key)) or _ends_in(p.text, p.answer)]
    if len(shown) <= len(prompts) / _STRAY:
        telling = [p for p in prompts if p.answer is not None and len(p.answer.strip()) >= 4]
        shown = [p for p in telling if (p.answer or "").strip() in p.text]
        if len(shown) <= len(telling) / 2 or len(shown) <= 3:
            return
    first = shown[0]
    yield data_warning(
        "answer-shown",
        f"{len(shown):,} of {len(prompts):,} prompts hold their own answer: {named(shown)}; row {first.row + 1} ends "
        f"in {first.text[-60:]!r}" + (f", and its answer is {first.answer[:40]!r}" if first.answer else ""),
        f"data.prompt_key, now {config.data.prompt_key!r}: is it the key of the question alone?",
    )


def _solution_key(config: Config) -> str:
    return config.reward.solution_key if isinstance(config.reward, CodeReward) else "solution"


def _holds(text: str, solution: Any) -> bool:
    enough = isinstance(solution, str) and len(solution) >= 20
    return enough and " ".join(solution.split()) in " ".join(text.split())


def _ends_in(text: str, answer: str | None) -> bool:
    """Whether the prompt says "Answer: 42", "... how many? 42" or the like at its end."""
    answer = (answer or "").strip()
    at = text.rfind(answer) if answer else -1
    if at < 1 or not _END.fullmatch(text, at + len(answer)):
        return False
    before = text[max(0, at - 40) : at]
    return bool(_CUE.search(before)) or (before.endswith("=") and at + len(answer) == len(text))


def check_room(config: Config, prompts: Sequence[Prompt], tokenizer: Any, positions: int | None) -> Iterator[Finding]:
    """Whether the worked solutions, or the answers where there are none, fit into a response.
    ``positions``: that the model was made for; None: any number."""
    limit, key = config.rollout.max_response_length, _solution_key(config)
    solutions = [text for p in prompts if isinstance(text := p.meta.get(key), str) and text.strip()]
    compared = config.reward.kind in ("math", "exact")  # elsewhere an answer may be anything
    texts = solutions or [p.answer for p in prompts if p.answer is not None and compared]
    if not texts:
        return
    lengths = [len(ids) + 1 for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]  # and the end
    over = sum(length > limit for length in lengths)
    if over <= (_LONG_SOLUTIONS * len(texts) if solutions else 0):
        return
    what = f"worked solutions (data key {key!r})" if solutions else "answers, without a word around them,"
    buffer = config.algorithm.overlong_buffer
    works = max(lengths) + (buffer.len if buffer.enable else 0)
    room = works if positions is None else min(works, positions - config.data.max_prompt_length)
    keys = f"rollout.max_response_length={room}"
    if config.training.tokens_per_micro_batch < config.data.max_prompt_length + room:
        keys += f" training.tokens_per_micro_batch={config.data.max_prompt_length + room}"
    yield data_warning(
        "answer-length",
        f"{over} of {len(texts)} {what} are longer than rollout.max_response_length={limit} (the longest has "
        f"{max(lengths)} tokens): such responses are cut before they come to an end",
        f"{keys}, or leave those rows out" if room > limit else "leave those rows out: the model has no more positions",
    )
