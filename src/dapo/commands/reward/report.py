"""What ``dapo reward check`` and ``dapo reward score`` say: disagreements, and what another reward changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from dapo.commands.inspect.sample_report import RIGHT, one_line, text_lines
from dapo.commands.reward.rescore import KINDS, Change, StepChange
from dapo.commands.shared.output import columns, terminal_width
from dapo.records import Reward
from dapo.reward.check import Checked, Expected
from dapo.util.terminal import visible


def in_words(reward: Reward) -> str:
    if reward.error is not None:
        return f"no verdict: {visible(reward.error)}"
    parts = "".join(f", {visible(name)} {value:g}" for name, value in reward.parts.items())
    return f"{RIGHT.get(reward.correct, 'neither right nor wrong')} (reward {reward.value:+.6g}{parts})"


def disagreement(checked: Checked) -> Iterator[str]:
    """A case that the reward does not agree with, as lines."""
    case, about = checked.case, dict(checked.case.about)
    name = f"  {visible(about.pop('name'))}" if "name" in about else ""
    yield f"{case.place}{name}"
    if case.prompt.text:
        yield from _long("prompt", case.prompt.text)
    yield from _long("solution" if case.is_program else "response", case.response)
    got = checked.outcome or "no verdict"
    if checked.detail:
        got = f"{got}: {one_line(checked.detail)}"
    if checked.reward is not None:
        got = in_words(checked.reward)
        yield f"  extracted {one_line(checked.reward.extracted)}  gold {one_line(case.prompt.answer)}"
    yield f"  expected {' or '.join(map(_expected, case.accepted))}, got {got}"
    if checked.doubt:
        yield f"  the case itself: {visible(checked.doubt)}"
    for key, text in about.items():
        yield f"  {key}: {one_line(text)}"


def _expected(value: Expected) -> str:
    if isinstance(value, bool):
        return "right" if value else "wrong"
    return value if isinstance(value, str) else f"a reward of {value:g}"


class Summary:
    """All steps together. Keeps numbers and at most ``examples`` samples of each kind of change."""

    def __init__(self, examples: int) -> None:
        self._most = examples
        self._examples: dict[str, list[Change]] = {kind: [] for kind in KINDS}
        self._steps: list[tuple[str, Mapping[str, float]]] = []

    def add(self, step: StepChange) -> None:
        self._steps.append((str(step.step), step.numbers))
        for change in step.changes:
            best = self._examples[change.kind]
            best.append(change)
            best.sort(key=lambda one: -abs(one.before.value - one.after.value))
            del best[self._most :]

    def lines(self) -> Iterator[str]:
        steps = self._steps if len(self._steps) == 1 else [*self._steps, ("all", self._total())]
        shown = [kind for kind in KINDS if kind in _ALWAYS or self._total()[kind]]
        kinds = [KINDS[kind] for kind in shown]
        header = ["step", "samples", *kinds, "reward", "reward now", "groups", "mixed", "mixed now"]
        rows = [[name, *_cells(numbers, shown)] for name, numbers in steps]
        yield from columns(header, rows, terminal_width())
        yield ""
        turns = zip_longest(*self._examples.values())  # as many kinds as possible, the most important first
        for change in [change for turn in turns for change in turn if change is not None][: self._most]:
            yield from _example(change)
            yield ""

    def verdict(self) -> str:
        total = self._total()
        if not total["changed"]:
            return f"nothing changed: {total['samples']:,} samples"
        groups = total["no_longer_kept"] + total["newly_kept"]
        return (
            f"changed: {total['changed']:,} of {total['samples']:,} samples; dynamic sampling decides otherwise about "
            f"{groups:,} of {total['groups']:,} groups ({total['no_longer_kept']:,} no longer kept, "
            f"{total['newly_kept']:,} newly)"
        )

    def _total(self) -> dict[str, float]:
        names = self._steps[0][1]
        return {name: sum(numbers[name] for _, numbers in self._steps) for name in names}


_ALWAYS = ("right_to_wrong", "wrong_to_right")


def _cells(numbers: Mapping[str, float], kinds: Sequence[str]) -> Iterator[str]:
    compared = numbers["compared"]
    for name in ("samples", *kinds):
        yield f"{numbers[name]:,}"
    for name in ("sum_before", "sum_after"):
        yield f"{numbers[name] / compared:+.4f}" if compared else "-"
    for name in ("groups", "kept_before", "kept_after"):
        yield f"{numbers[name]:,}"


def _example(change: Change) -> Iterator[str]:
    sample, before, after = change.sample, change.before, change.after
    place = "  ".join(f"{name} {sample[name]}" for name in ("step", "row", "draw", "index"))
    yield f"{place}  {KINDS[change.kind]}"
    yield from _long("response", sample["response"])
    found = [one_line(before.extracted), one_line(after.extracted)]
    yield f"  extracted {' -> '.join(dict.fromkeys(found))}  gold {one_line(sample['gold'])}"
    yield f"  {in_words(before)} -> {in_words(after)}"


def _long(name: str, text: str) -> Iterator[str]:
    yield from text_lines(name, text, terminal_width() or 100, full=False)
