"""What ``dapo inspect RUN`` says of samples (``--samples``): text as it was, verdict, and what training made of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from dapo.commands.shared.output import columns
from dapo.environments.trace import EPISODE_ENDS, TURN_ENDS
from dapo.errors import ConfigError
from dapo.observe.samples import STATUSES
from dapo.util.terminal import visible

_MOST_LETTERS = 1000  # of a text that is cut: so many are shown, the beginning and the end

RIGHT: Mapping[Any, str] = {True: "right", False: "wrong"}


def statuses(text: str | None) -> tuple[str, ...]:
    """The statuses in a list such as ``kept,all_wrong``. Raises ConfigError if one is unknown."""
    names = tuple(filter(None, (part.strip() for part in (text or "").split(","))))
    for name in names:
        if name not in STATUSES:
            raise ConfigError(f"--status {name}: there is no such status; there are {', '.join(STATUSES)}")
    return names


def show(sample: Mapping[str, Any], width: int, full: bool) -> Iterator[str]:
    status = str(sample.get("status"))
    sample = {"index": sample.get("sample"), **sample}
    place = "  ".join(f"{name} {sample.get(name)}" for name in ("step", "row", "draw", "index"))
    yield f"{place}  {status} ({STATUSES.get(status, 'unknown')})"
    for name in ("prompt", "response"):
        text = str(sample.get(name, "(the texts of this step are gone)"))
        pieces = list(episode_pieces(sample)) if name == "response" else []
        for label, piece in pieces or [(name, text)]:
            yield from text_lines(label, piece, width, full)
    yield f"  extracted {one_line(sample.get('extracted'))}  gold {one_line(sample.get('gold'))}  {verdict(sample)}"
    yield f"  {_numbers(sample)}"
    if measures := _measures(sample):
        yield f"  {measures}"


def episode_pieces(sample: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The response of an episode in pieces, each with whose it is; nothing of a single response."""
    text, at = str(sample.get("response", "")), 0
    for number, (_, _, stop, reward, _, (start, end)) in enumerate(sample.get("turns") or (), 1):
        if text[at:start].strip():
            yield "reply", text[at:start].strip("\n")
        paid = f" [reward {reward:+g}]" * bool(reward)
        yield f"turn {number}", text[start:end] + f" [{TURN_ENDS.get(stop, stop)}]" * (stop != "stop") + paid
        at = end
    if sample.get("ended"):
        yield "ended", f"{EPISODE_ENDS.get(sample['ended'], sample['ended'])}; {sample.get('sampled')} tokens sampled"


def text_lines(name: str, text: str, width: int, full: bool) -> Iterator[str]:
    """A text of a sample behind its name, ``width`` cells wide; cut in the middle unless ``full``."""
    if not full and len(text) > _MOST_LETTERS:
        half = _MOST_LETTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} letters; --full shows them]\n{text[-half:]}"
    label = f"  {name:<8} "
    for line in visible(text).split("\n"):
        for part in textwrap.wrap(line, max(20, width - 11), drop_whitespace=False, tabsize=1) or [""]:
            yield f"{label}| {part}"
            label = " " * 11


def verdict(sample: Mapping[str, Any]) -> str:
    if sample.get("error"):
        return f"no verdict: {visible(sample['error'])}"
    return RIGHT.get(sample.get("correct"), "neither right nor wrong")


def _numbers(sample: Mapping[str, Any]) -> str:
    parts = "".join(f", {visible(name)} {value:g}" for name, value in (sample.get("parts") or {}).items())
    shaped, advantage = sample.get("shaped_reward"), sample.get("advantage")
    versions = sample.get("versions") or []
    fields = [
        f"reward {_number(sample.get('reward'))}{parts}",
        "" if shaped is None else f"shaped {_number(shaped)}",
        "" if advantage is None else f"advantage {_number(advantage)}",
        "" if sample.get("in_loss") or sample.get("status") != "kept" else "not in the loss",
        f"length {sample.get('length')} ({'truncated' if sample.get('finish_reason') == 'length' else 'ended'})",
        f"version {'-'.join(str(v) for v in dict.fromkeys(versions))}" if versions else "",
    ]
    return "  ".join(filter(None, fields))


def _number(value: Any) -> str:
    return f"{value:+.4g}" if isinstance(value, int | float) else "-"


def one_line(text: Any) -> str:
    """A text that was found, or that there is none."""
    return "none" if text is None else visible(text).replace("\n", "\\n")


def _measures(sample: Mapping[str, Any]) -> str:
    names = {"entropy": "entropy", "logprob_engine": "log-prob of engine", "logprob_trainer": "of trainer"}
    fields = [f"{text} {sample[name]:.4g}" for name, text in names.items() if sample.get(name) is not None]
    if sample.get("gap_max") is not None:
        fields.append(f"largest difference {sample['gap_max']:.2g}")
    if sample.get("check_correct") is not None:
        fields.append(f"held-out check {'right' if sample['check_correct'] else 'wrong'}")
    return "  ".join(fields)


_COLUMNS = ("step", "row", "draw", "#", "status", "verdict", "reward", "adv.", "length", "entropy", "answer", "gold")
_LONGEST_ANSWER, _LEAST_RESPONSE = 16, 10


def table(samples: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """A line of ``width`` cells for each, with as much of its response as there is room for."""
    header, rows = [*_COLUMNS], [_cells({"index": sample.get("sample"), **sample}) for sample in samples]
    room = width - sum(max(map(cell_len, column)) + 2 for column in zip(header, *rows, strict=True))
    if room >= _LEAST_RESPONSE:
        header.append("response".ljust(room))
        for row, sample in zip(rows, samples, strict=True):
            row.append(set_cell_size(one_line(str(sample.get("response", ""))[:room]), room))
    return columns(header, rows)


def _cells(sample: Mapping[str, Any]) -> list[str]:
    said = "failed" if sample.get("error") else RIGHT.get(sample.get("correct"), "-")
    entropy = "-" if sample.get("entropy") is None else f"{sample['entropy']:.3f}"
    places = [str(sample.get(name)) for name in ("step", "row", "draw", "index", "status")]
    numbers = [_number(sample.get("reward")), _number(sample.get("advantage")), str(sample.get("length")), entropy]
    answers = [one_line(sample.get(name)) for name in ("extracted", "gold")]
    return [*places, said, *numbers, *(set_cell_size(text, min(cell_len(text), _LONGEST_ANSWER)) for text in answers)]
