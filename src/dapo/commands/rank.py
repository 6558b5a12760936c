"""``dapo rank`` and ``dapo filter``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared import options
from dapo.commands.shared.output import print_lines, require_writable, say
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from dapo.ranking.calibrate import Calibration
    from dapo.ranking.rows import Candidates
    from dapo.ranking.score import Scored
    from dapo.reward.contract import Scorer

RankerName = Annotated[
    str,
    typer.Argument(
        metavar="RANKER",
        help="Reward model or the run that made it, run of dapo dpo, recipe with a reward, or kind of reward.",
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILES] [REWARD.KEY=VALUE]", help="Files of rows with responses, and keys to change."),
]
Reference = Annotated[
    str | None, typer.Option(metavar="POLICY", help="What DPO began with, where RANKER is a policy without its run.")
]
Rows = Annotated[int | None, typer.Option(min=1, metavar="N", help="The first so many rows of each file.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the lines there, and print a summary.")]


def rank(
    ranker: RankerName,
    words: Words = None,
    reference: Reference = None,
    rows: Rows = None,
    unsure: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Give the N pairs that a label would teach most instead.")
    ] = None,
    output: Output = None,
) -> None:
    """Order the responses of each row, the best first, as JSON lines. Where rows have labels, say how well that agrees.

    A row has a prompt, and candidates; or chosen and rejected (or correct_code and incorrect_code); or responses.
    """
    from dapo.ranking.measures import least_sure, summary, summary_lines
    from dapo.ranking.score import best_first

    load, files = _opened(ranker, words, reference, output)
    found, scored = _scored(load(), files, rows)
    pairs = zip(found, scored, strict=True)
    ranked = (_line(row, ranking=[one.told for one in best_first(several)]) for row, several in pairs)
    _give(ranked if unsure is None else least_sure(found, scored, unsure), output)
    say(summary_lines(summary(found, scored)), stderr=output is None)


def filter_responses(
    ranker: RankerName,
    words: Words = None,
    reference: Reference = None,
    labelled: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Rows with labels: half of their prompts to choose the threshold on, half to check it."
        ),
    ] = None,
    precision: Annotated[
        float | None, typer.Option(min=0, max=1, help="Wanted share of right ones among what is kept.")
    ] = None,
    recall: Annotated[
        float | None, typer.Option(min=0, max=1, help="Wanted share of the right ones that are kept.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Thresholds by language model: written with --labelled, or read."),
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Keep what scores above this, uncalibrated.")] = None,
    rows: Rows = None,
    output: Output = None,
) -> None:
    """Keep the responses that pass a threshold, which is calibrated on labelled rows, as JSON lines.

    Rows with a key model have a threshold for each language model. That nothing passes is no error.
    """
    from dapo.ranking.calibrate import passing, read_thresholds, write_calibrations
    from dapo.ranking.rows import EVERY

    _check_options(labelled, precision, recall, calibration, threshold)
    load, files = _opened(ranker, words, reference, output, needs_files=not labelled)
    if labelled:
        goal, wanted = ("precision", precision) if precision is not None else ("recall", recall)
        require_writable("--calibration", calibration)
        found = _calibrations(load(), labelled, goal, wanted or 0.0)
        thresholds = {name: one.threshold for name, one in found.items()}
        if calibration is not None:
            write_calibrations(calibration, ranker, found)
        say(_told(found), stderr=bool(files) and output is None)
    else:
        thresholds = {EVERY: threshold or 0.0} if calibration is None else read_thresholds(calibration, ranker)
    if files:
        given, scored = _scored(load(), files, rows)
        kept = passing(given, scored, thresholds)
        pairs = [(row, one) for row, several in zip(given, kept, strict=True) for one in several]
        _give((_kept(row, one) for row, one in pairs), output)
        say([f"kept {len(pairs)} of {sum(map(len, scored))} responses"], stderr=output is None)


def _check_options(
    labelled: Any, precision: float | None, recall: float | None, calibration: Path | None, threshold: float | None
) -> None:
    """Raises ConfigError: they name no threshold, or two, or one that is no number."""
    if threshold is not None and isnan(threshold):  # nothing is above it
        raise ConfigError(f"--threshold {threshold}: must be a number")
    if labelled and (precision is None) == (recall is None):
        raise ConfigError("--labelled: say what to choose the threshold for, --precision P or --recall R")
    if not labelled and (precision is not None or recall is not None):
        raise ConfigError("--precision, --recall: need labelled rows to choose a threshold on: --labelled FILE")
    if sum(map(bool, (labelled, calibration and not labelled, threshold is not None))) != 1:
        raise ConfigError("give one of --labelled FILE (and --precision or --recall), --calibration FILE, --threshold")


def _opened(
    ranker: str, words: list[str] | None, reference: str | None, output: Path | None, needs_files: bool = True
) -> tuple[Callable[[], Scorer], list[str]]:
    """What loads the ranker, which is used once, and the files."""
    from dapo.ranking.score import load_ranker

    files, overrides = options.files_and_settings(words)
    if needs_files and not files:
        raise ConfigError("FILES: required but not given: rows with a prompt and responses, as JSON lines or Parquet")
    require_writable("--output", output)
    return partial(load_ranker, ranker, reference=reference, overrides=overrides), files


def _scored(ranker: Scorer, files: Sequence[str], rows: int | None) -> tuple[list[Candidates], list[list[Scored]]]:
    from dapo.ranking.rows import read_candidates
    from dapo.ranking.score import score_rows

    found = read_candidates(files, rows)
    return found, score_rows(ranker, found)


def _calibrations(ranker: Scorer, labelled: Sequence[str], goal: Any, wanted: float) -> dict[str, Calibration]:
    """By the language model that wrote. Raises DataError: for one of them nothing reaches what is wanted."""
    from dapo.errors import DataError
    from dapo.ranking.calibrate import calibrate, labelled_of

    found = {}
    for name, data in labelled_of(*_scored(ranker, labelled, None)).items():
        try:
            found[name] = calibrate(data, goal, wanted)
        except DataError as error:
            raise DataError(f"{'--labelled' if name == '*' else f'responses of {name}'}: {error}") from None
    return found


def _told(found: Mapping[str, Calibration]) -> Iterable[str]:
    for name, one in found.items():
        who = "" if name == "*" else f"{name}: "
        yield f"{who}threshold {one.threshold:.5g} for a {one.goal} of {one.wanted:g}: {one.verdict} on other rows"
        for part, measured in (("chosen on", one.chosen_on), ("checked on", one.check)):
            told = f"precision {measured.precision.text('.3f')}, recall {measured.recall.text('.3f')}"
            yield f"  {part} {measured.responses} responses, {measured.kept} kept: {told}"


def _line(row: Candidates, **more: Any) -> dict[str, Any]:
    return {"prompt": row.prompt, **({} if row.model == "*" else {"model": row.model}), **more}


def _kept(row: Candidates, one: Scored) -> dict[str, Any]:
    """As fine-tuning reads it."""
    label = {"label": row.labels[one.index]} if row.labels else {}
    return _line(row, response=one.text, score=one.score, **label)


def _give(lines: Iterable[Mapping[str, Any]], output: Path | None) -> None:
    from dapo.util.files import json_line, write_atomic

    texts = list(map(json_line, lines))
    if output is None:
        print_lines(text.rstrip("\n") for text in texts)
    else:
        write_atomic(output, texts)
