"""Checks of the reward: that it starts, and that it is sane on the answers themselves.

The reference answer, written as the reward wants it, has to be right; another row's and an empty response must not be.
Where the form is not known (a function, a judge, a server) several are tried, and the one that is right most often is
taken."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dapo.checks.answers import marker_of, spread, strip_marker
from dapo.checks.context import CheckContext, Finding
from dapo.config import CodeReward, ComposeReward, Config, ExactReward, MathReward, RewardConfig
from dapo.config.composed_reward import changed_each, plain_rewards
from dapo.config.reward import RemoteReward
from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt, Reward
from dapo.reward.build import make_scorer
from dapo.reward.check import running, score_each
from dapo.reward.contract import Scorer
from dapo.util.escapes import restored

PROMPTS, COSTLY_PROMPTS = 16, 2  # rows whose answers are tried; of rewards that cost time or money for each
EXAMINED = 2000
REACHED_WITHIN_S = 5.0
SECONDS = 60.0

_WHOLE = re.compile(r"^(-?[0-9]+)\.0+$")

Form = tuple[str, Callable[[Prompt], str | None]]
"""How an answer is written: what it is called, and the response made from a row (None: the row has no answer)."""
Scored = Sequence[tuple[Prompt, str, Reward]]  # rows, responses and what these got


def _written(name: str, before: str, after: str = "") -> Form:
    return name, lambda prompt: None if prompt.answer is None else f"{before}{prompt.answer.strip()}{after}"


_BARE = _written("the bare answer", "")
_BOXED = _written("\\boxed{}", "\\boxed{", "}")
_LINE = _written('"Answer:"', "Answer: ")
_COMMON = (_BARE, _LINE, _BOXED, _written("####", "#### "), _written("<answer>", "<answer>", "</answer>"))


def forms_of(reward: RewardConfig) -> tuple[Form, ...]:
    match reward:
        case MathReward():
            return (_BOXED,) if "boxed" in reward.extract else (_LINE,)
        case ExactReward():
            return (_written(f"after {reward.after!r}" if reward.after else "the bare answer", reward.after or ""),)
        case CodeReward():
            return (("a code block", lambda prompt: _program(prompt, reward.solution_key)),)
        case ComposeReward():
            judge = reward.rewards.get(reward.correct or "")
            return forms_of(judge) if judge is not None else _COMMON
        case _:
            return (_BARE,) if isinstance(reward, RemoteReward) else _COMMON


def _program(prompt: Prompt, key: str) -> str | None:
    solution = prompt.meta.get(key)
    return f"```python\n{solution}\n```" if isinstance(solution, str) else None


def impatient(reward: RewardConfig) -> RewardConfig:
    """The same reward, but that a server that does not answer is given up after a few seconds."""

    def limits(one: RewardConfig) -> dict[str, float]:
        if not isinstance(one, RemoteReward):
            return {}
        return {"give_up_after_s": REACHED_WITHIN_S, "timeout_s": min(one.timeout_s, 30.0)}

    return changed_each(reward, limits)


def check_sandbox(context: CheckContext) -> Iterator[Finding]:
    named = [reward for reward in (context.config.reward, context.config.monitor.check) if reward is not None]
    rewards = [one for reward in named for one in plain_rewards(reward)]
    wanted = [reward for reward in rewards if isinstance(reward, CodeReward) and reward.sandbox != "none"]
    if not wanted:
        return
    from dapo.reward.code.sandbox import Sandbox, SandboxLimits

    code = wanted[0]
    limits = SandboxLimits(code.memory_mb * 2**20, code.max_processes, code.scratch_mb * 2**20)
    try:
        Sandbox(limits, code.sandbox, code.packages).check()
    except RewardError as error:
        context.reward_works = False
        yield Finding("reward", "sandbox", "fail", str(error), "apt-get install bubblewrap")
        return
    yield Finding("reward", "sandbox", "pass", "bubblewrap starts")


def check_reward(context: CheckContext) -> Iterator[Finding]:
    """Start the reward as training does, and score what is known to be right and wrong."""
    if context.reward_works is False or context.own_reward:  # the sandbox has told why; the environment scores
        return
    findings: list[Finding] = []
    with _quiet():
        try:
            asyncio.run(asyncio.wait_for(_start(context, impatient(context.config.reward), findings), SECONDS))
        except TimeoutError:
            text, fix = f"not done after {SECONDS:g} s", "reward.timeout_s: does one score take so long?"
            findings.append(Finding("reward", "reward", "fail", text, fix))
    yield from findings


async def _start(context: CheckContext, reward: RewardConfig, findings: list[Finding]) -> None:
    remote = any(isinstance(one, RemoteReward) for one in plain_rewards(reward))
    name = "reward-server" if remote else "reward"
    try:
        async with running(make_scorer(reward)) as scorer:
            context.reward_works = True
            findings.append(Finding("reward", name, "pass", f"{reward.kind} {'answers' if remote else 'starts'}"))
            if context.source is not None:
                findings += await verify(context.config, scorer, list(context.source.untokenized()))
    except RewardError as error:
        context.reward_works = context.reward_works or False
        findings.append(Finding("reward", name, "fail", str(error), _mended(reward)))


def _mended(reward: RewardConfig) -> str:
    keys = {"function": "mend the function, or reward.function=FILE.py:NAME of another", "model": "reward.path=FOLDER"}
    if any(isinstance(one, RemoteReward) for one in plain_rewards(reward)):
        return "start the server, or set reward.url to where it is"
    return keys.get(reward.kind, "mend the reward; dapo reward check RECIPE FILES tries it on labelled cases")


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("dapo")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# --- right answers, wrong answers ---------------------------------------------------------------------------------


async def verify(config: Config, scorer: Scorer, prompts: Sequence[Prompt]) -> list[Finding]:
    """Whether the reward, whose scorer is started, is sane on the rows' own answers (token ids may be left out).
    Raises RewardError: the reward breaks its contract."""
    found: list[Finding] = []
    doubts = await scorer.examine(prompts[:EXAMINED])
    unusable = [doubt for doubt in doubts if doubt.unusable]
    if doubts:
        first = (unusable or list(doubts))[0]
        marker = marker_of(prompts[first.position].answer)
        mend = "mend or remove them; dapo data check shows where rows stand"
        mend = strip_marker(config, marker) if marker else mend
        text = f"{len(unusable or doubts)} of {min(len(prompts), EXAMINED)} rows "
        text += f"{'cannot be scored' if unusable else 'are in doubt'}, such as row {prompts[first.position].row + 1}"
        status: Any = "fail" if unusable else "warn"
        found.append(Finding("data", "gold-readable", status, f"{text}: {first.text}", mend))
        if unusable:
            return found
    doubted = {doubt.position for doubt in doubts}
    sound = [prompt for place, prompt in enumerate(prompts) if place not in doubted] or list(prompts)
    costly = any(isinstance(one, RemoteReward) for one in plain_rewards(config.reward)) or config.reward.kind == "model"
    few = spread(sound, COSTLY_PROMPTS if costly else PROMPTS)
    return found + await _on_answers(config, scorer, few)


async def verify_within(config: Config, scorer: Scorer, prompts: Sequence[Prompt], seconds: float) -> list[Finding]:
    """:func:`verify`, given up after a time without a word. Raises nothing: the run itself meets what is broken."""
    try:
        return await asyncio.wait_for(verify(config, scorer, prompts), seconds)
    except Exception:
        return []


async def _on_answers(config: Config, scorer: Scorer, prompts: Sequence[Prompt]) -> list[Finding]:
    best: tuple[str, list[tuple[Prompt, str, Reward]]] | None = None
    for name, write in forms_of(config.reward):
        written = [(prompt, text) for prompt in prompts if (text := write(prompt)) is not None]
        if not written:
            continue
        tried = await scores(scorer, written[:2]) if best is None else []
        if tried and all(reward.error is not None for reward in tried):  # the others would take as long
            text = f"{len(tried)} of {len(tried)} scores failed: {tried[0].error}"
            return [Finding("reward", "scores", "fail", text, "reward.timeout_s, or mend the reward")]
        rewards = await scores(scorer, written)
        scored = [(*pair, reward) for pair, reward in zip(written, rewards, strict=True)]
        if best is None or _right(scored) > _right(best[1]):
            best = name, scored
        if _right(scored) == len(scored):
            break
    if best is None:
        what = "reference solutions" if config.reward.kind == "code" else "answers"
        return [Finding("reward", "gold-is-right", "skip", f"the rows have no {what} to try the reward on")]
    name, scored = best
    failed = [reward.error for _, _, reward in scored if reward.error is not None]
    if failed:
        text, count = Counter(failed).most_common(1)[0]
        status: Any = "fail" if len(failed) == len(scored) else "warn"
        told = f"{len(failed)} of {len(scored)} scores failed: {text} ({count} x)"
        return [Finding("reward", "scores", status, told, "reward.timeout_s, or mend the reward")]
    if all(reward.correct is None for _, _, reward in scored):
        return await _without_verdicts(config, scorer, scored)
    return await _with_verdicts(config, scorer, name, scored)


def _right(scored: Scored) -> int:
    return sum(reward.correct is True for _, _, reward in scored)


async def scores(scorer: Scorer, written: Sequence[tuple[Prompt, str]]) -> list[Reward]:
    """Of rows and responses, which no model wrote: they go on from no prompt's end.
    Raises RewardError: the reward breaks its contract."""
    end: FinishReason = "stop"
    items = [(f"row {prompt.row + 1}", replace(prompt, end=""), text, end) for prompt, text in written]
    try:
        return await score_each(scorer, items, lambda: None)
    except ExceptionGroup as group:  # of scores at the same time: one of them says enough
        raise group.exceptions[0] from None


def shuffled(scored: Scored) -> list[tuple[Prompt, str]]:
    """Each row with the response of the next one whose response differs; rows that have none are left out."""
    texts = [text for _, text, _ in scored]
    others = [texts[place + 1 :] + texts[:place] for place in range(len(texts))]
    found = [[o for o in several if o.strip() != text.strip()] for several, text in zip(others, texts, strict=True)]
    return [(prompt, several[0]) for (prompt, _, _), several in zip(scored, found, strict=True) if several]


async def _with_verdicts(config: Config, scorer: Scorer, form: str, scored: Scored) -> list[Finding]:
    right, count = _right(scored), len(scored)
    if right < count:
        prompt, text, reward = next(item for item in scored if item[2].correct is not True)
        said = "" if reward.extracted is None else f" (it read {reward.extracted[:60]!r})"
        told = f"{count - right} of {count} reference answers ({form}) are not right, such as row {prompt.row + 1}: "
        told += f"{text[:80]!r}{said}"
        status: Any = "fail" if config.reward.kind in ("math", "exact", "code") and right <= count / 2 else "warn"
        found = [Finding("reward", "gold-is-right", status, told, _mend_gold(config, prompt))]
        if not right:  # a reward that calls nothing right says nothing by calling others wrong
            return found
    else:
        found = [Finding("reward", "gold-is-right", "pass", f"{count} of {count} reference answers ({form})")]
    prompts = [prompt for prompt, _, _ in scored]
    found += await _as_a_model_writes(config, scorer, form, prompts)
    pairs, empty = shuffled(scored), [(prompt, "") for prompt in prompts]
    verdicts = await scores(scorer, [*pairs, *empty])
    wrongly = [pair for pair, reward in zip(pairs, verdicts, strict=False) if reward.correct]
    empty_right = sum(reward.correct is True for reward in verdicts[len(pairs) :])
    fix = "the reward must compare the response with the row's answer; dapo reward check tries it on labelled cases"
    if wrongly:
        prompt, text = wrongly[0]
        also = f"; {empty_right} empty responses are right, too" if empty_right else ""
        told = f"{len(wrongly)} of {len(pairs)} answers of other rows are right, such as {text[:60]!r} for row "
        told += f"{prompt.row + 1} with answer {(prompt.answer or '')[:60]!r}{also}"
        often = len(wrongly) > len(pairs) / 2
        return [*found, Finding("reward", "shuffled-is-wrong", "fail" if often else "warn", told, fix)]
    if pairs:
        told = f"none of {len(pairs)} answers of other rows is right"
        found.append(Finding("reward", "shuffled-is-wrong", "pass", told))
    if listed := await _right_in_a_list(config, scorer, prompts):
        found.append(Finding("reward", "list-is-wrong", "warn", listed, fix))
    if empty_right:
        told = f"{empty_right} of {len(empty)} empty responses are right"
        return [*found, Finding("reward", "empty-is-wrong", "fail", told, fix)]
    if failed := [reward.error for reward in verdicts[len(pairs) :] if reward.error is not None]:
        told = f"{len(failed)} of {len(empty)} scores of an empty response failed: {failed[0]}"
        return [*found, Finding("reward", "empty-is-wrong", "warn", told, "a wrong response is wrong, not a failure")]
    return [*found, Finding("reward", "empty-is-wrong", "pass", "an empty response is not right")]


async def _as_a_model_writes(config: Config, scorer: Scorer, form: str, prompts: Sequence[Prompt]) -> list[Finding]:
    """Reference answers that no model writes so (2.0 of 2, a form feed of a backslash): are they right as it would? An
    answer that is compared with itself is right whatever it holds."""
    write = dict(forms_of(config.reward))[form]
    meant = [replace(p, answer=_WHOLE.sub(r"\1", restored(p.answer.strip()))) for p in prompts if p.answer is not None]
    others = {p.row: p for p in prompts}
    varied = [(others[p.row], write(p) or "") for p in meant if p.answer != (others[p.row].answer or "").strip()]
    wrong = [pair for pair, reward in zip(varied, await scores(scorer, varied), strict=True) if not reward.correct]
    if not wrong or config.reward.kind == "code":
        return []
    prompt, text = wrong[0]
    told = f"{len(wrong)} of {len(prompts)} reference answers are wrong as a model would write them, such as row "
    told += f"{prompt.row + 1}: {text[:60]!r} for the answer {(prompt.answer or '')[:60]!r}"
    return [Finding("reward", "gold-as-written", "warn", told, _mend_gold(config, prompt))]


async def _right_in_a_list(config: Config, scorer: Scorer, prompts: Sequence[Prompt]) -> str | None:
    answers = list(dict.fromkeys(p.answer.strip() for p in prompts if p.answer is not None and p.answer.strip()))
    if config.reward.kind != "function" or len(answers) < 3:
        return None
    # the right one is neither the first nor the last, either of which a reward may well read
    lists = [
        (p, ", ".join([others[0], p.answer.strip(), *others[1:]]))
        for p in prompts
        if p.answer is not None and (others := [text for text in answers if text != p.answer.strip()])
    ]
    right = [pair for pair, reward in zip(lists, await scores(scorer, lists), strict=True) if reward.correct]
    if len(right) <= len(lists) / 2:
        return None
    prompt, text = right[0]
    told = f"{len(right)} of {len(lists)} responses that list the answers of many rows are right, such as "
    return f"{told}{text[:60]!r} for row {prompt.row + 1}: a model learns to list"


def _mend_gold(config: Config, prompt: Prompt) -> str:
    reward, marker = config.reward, marker_of(prompt.answer)
    if marker:
        return strip_marker(config, marker)
    if reward.kind == "exact":
        return "reward.kind=math for answers that are written in several ways, or clean the answers"
    if reward.kind == "code":
        return "mend solution or tests of these rows"
    return f"data.answer_key, now {config.data.answer_key!r}: is it the bare final answer? Otherwise mend the reward"


async def _without_verdicts(config: Config, scorer: Scorer, scored: Scored) -> list[Finding]:
    filters = config.algorithm.filter_groups
    if filters.enable and filters.metric == "acc":
        text = "the reward does not say whether a response is right, which dynamic sampling decides by"
        advice = "return a bool or dapo.records.Reward(correct=..., value=...), or algorithm.filter_groups.metric=score"
        return [Finding("reward", "scores", "fail", text, advice)]
    values = [reward.value for _, _, reward in scored]
    others = await scores(scorer, [*shuffled(scored), *((prompt, "") for prompt, _, _ in scored)])
    if len({*values, *(reward.value for reward in others)}) == 1:
        text = f"reference answers, those of other rows and empty responses all get {values[0]:g}"
        return [Finding("reward", "scores", "fail", text, "mend the reward: nothing can be learned from a constant")]
    empty = [reward.value for reward in others[-len(scored) :]]
    text = f"answers get {sum(values) / len(values):.3g}, empty responses {sum(empty) / len(empty):.3g} on average"
    if sum(empty) > sum(values):
        return [Finding("reward", "empty-is-wrong", "warn", text, "is a larger reward the better one here?")]
    return [Finding("reward", "scores", "pass", text)]
