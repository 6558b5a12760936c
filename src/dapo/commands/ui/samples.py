"""The page's routes over the samples of a run: groups, texts and tokens, sampling, reward hacking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from dapo.commands.ui import curves, queries
from dapo.commands.ui.queries import Whole
from dapo.commands.ui.runs import WHILE_THERE, NotHere, Points, Run, RunAsked
from dapo.commands.ui.texts import pieces, search, sendable, summary_of, tokenizer_of, tokens_of
from dapo.errors import UserError
from dapo.observe.run_view import OUTCOMES, RunView
from dapo.observe.sample_rows import read_line
from dapo.observe.samples import STATUSES

MOST_TOKENS = 25_000  # Whose numbers are in one answer: a megabyte of JSON. A response of the paper's 20,480 fits.
BEGINNING = 2_000  # characters of a response that is not shown whole

_SAMPLING = (
    *("groups/all_wrong", "groups/mixed", "groups/all_right", "groups/flat", "groups/drawn", "groups/kept"),
    *("groups/keep_rate", "groups/rounds", "tokens/generated", "tokens/wasted", "tokens/filtered"),
)
_HACKING = (
    *("monitor/reward", "monitor/check", "monitor/false_right", "monitor/length_correlation"),
    *("reward/mean", "response_length/mean"),
)

router = APIRouter(prefix="/api", dependencies=WHILE_THERE)


@router.get("/groups")
def groups(run: RunAsked, wanted: Annotated[queries.GroupFilter, Query()]) -> dict[str, Any]:
    found = queries.groups(run.samples(), wanted)
    total = found[0]["total"] if found else 0
    for group in found:
        group["prompt"] = summary_of(_line(run, group))
        for name in ("total", "text_offset", "text_length"):
            del group[name]
    return {"total": total, "groups": found, "statuses": STATUSES, **queries.bounds(run.samples())}


@router.get("/search")
def find(
    run: RunAsked, text: Annotated[str, Query(min_length=1, max_length=200)], step: Whole | None = None, skip: Whole = 0
) -> dict[str, Any]:
    """Where the text is in the samples, newest first; ``step`` and ``skip``: ``next`` of the answer before."""
    return search(run.folder.samples, text, None if step is None else (step, skip))


@router.get("/group")
def group(run: RunAsked, step: Whole, draw: Whole) -> dict[str, Any]:
    """One group: its prompt, and every sample with text, tokens and numbers.

    Of a group with more than :data:`MOST_TOKENS` tokens there is the beginning of each text alone, ``whole`` is false,
    and ``/sample`` has what is missing.
    """
    found = _group_of(run, step, draw)
    lines = [_line(run, row) for row in found]
    further = sum(len(part["token_ids"]) for line in lines for part in line.get("more", ()))
    whole = further + sum(row["length"] or 0 for row in found) <= MOST_TOKENS
    tokens = tokens_of(run.folder, step, [row["position"] for row in found]) if whole else [{} for _ in found]
    status = found[0]["status"]
    return {
        "whole": whole,
        "prompt": lines[0].get("prompt"),
        "gold": found[0]["gold"],
        "status": status,
        "step": step,
        "draw": draw,
        "row": found[0]["row"],
        "why": STATUSES.get(status, status),
        "samples": [
            row | {"response": _beginning(line.get("response"), whole), "tokens": arrays} | _episode(run, line, whole)
            for row, line, arrays in zip(found, lines, tokens, strict=True)
        ],
    }


@router.get("/sample")
def sample(run: RunAsked, step: Whole, draw: Whole, sample: Whole) -> dict[str, Any]:
    row = next((row for row in _group_of(run, step, draw) if row["sample"] == sample), None)
    if row is None:
        raise NotHere(f"draw {draw} of step {step} of {run.name} has no sample {sample}")
    tokens = tokens_of(run.folder, step, [row["position"]], MOST_TOKENS)[0]
    line = _line(run, row)
    return {"response": line.get("response"), "tokens": tokens} | _episode(run, line, True)


@router.get("/sampling")
def sampling(run: RunAsked, points: Points = 300) -> dict[str, Any]:
    view = run.view
    tenth = max(view.steps_done // 10, 1)
    found = queries.outcomes(run.samples(), tenth, view.steps_done - tenth)
    return {
        "curves": curves.curves(view.metrics, _SAMPLING, points),
        "difficulty": found["difficulty"],
        "drawn": sum(e.get("groups/drawn") or 0 for e in view.metrics),
        "statuses": _outcomes(view, found["statuses"]),
        "tenth": tenth,
    }


@router.get("/hacking")
def hacking(run: RunAsked, points: Points = 300) -> dict[str, Any]:
    """Trained reward against the held-out check and against length; the samples that they disagree on."""
    connection = run.samples()
    found = queries.disagreements(connection)
    for row in found:
        line = _line(run, row)
        row["prompt"], row["response"] = summary_of(line), str(line.get("response") or "")[:600]
    return {
        "curves": curves.curves(run.view.metrics, _HACKING, points),
        "lengths": queries.reward_by_length(connection),
        "disagreements": found,
        **queries.bounds(connection),
    }


def _outcomes(view: RunView, stored: Sequence[queries.Row]) -> list[dict[str, Any]]:
    """What became of all groups, by the metrics; ``samples`` and ``tokens`` of those whose samples are stored."""
    there = {row["status"]: row for row in stored}
    return [
        {"status": status, "groups": groups, "why": OUTCOMES[status]}
        | {name: there.get(status, {}).get(name) for name in ("samples", "tokens")}
        for status, groups in sorted(view.outcomes.items(), key=lambda item: -item[1])
    ]


def _group_of(run: Run, step: int, draw: int) -> list[queries.Row]:
    found = queries.group(run.samples(), step, draw)
    if not found:
        raise NotHere(f"step {step} of {run.name} has no draw {draw}")
    return found


def _beginning(text: str | None, whole: bool) -> str | None:
    return text if whole or text is None or len(text) <= BEGINNING else text[:BEGINNING] + " …"


def _episode(run: Run, line: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    """What an episode has beside: its turns, why it ended, what it began with where that is not the prompt, and its
    further sequences. ``whole``: with their tokens."""
    tokenizer = tokenizer_of(run.folder) if whole else None

    def sequence(part: Mapping[str, Any]) -> dict[str, Any]:
        ids = (part.get(name, ())[:MOST_TOKENS] for name in ("prompt_ids", "token_ids"))
        begun, said = (pieces(tokenizer, some) if tokenizer is not None else [] for some in ids)
        tokens = {"pieces": said, "logprob_engine": part.get("logprobs")}
        return {"turns": part["turns"], "opening": "".join(begun), "tokens": tokens}

    if "ended" not in line:
        return {}
    more = {"ended": line["ended"], "sampled": line["sampled"], "more": [*map(sequence, line["more"])]}
    return {name: value for name, value in sequence(line).items() if name != "tokens"} | more


def _line(run: Run, row: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of a sample; empty where they are gone, as the numbers may be there without them."""
    try:
        line = read_line(run.folder.samples, row)
    except UserError:
        return {}
    return {k: sendable(v) if isinstance(v, str) else v for k, v in line.items()}
