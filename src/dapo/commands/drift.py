"""What ``dapo evaluate`` tells of rankers, and of drift (``--since``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.commands.shared.output import require_writable, say
from dapo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dapo.inference.evaluate import FileResult
    from dapo.ranking.drift import Drift


def ranks(model: str) -> bool:
    """Whether MODEL is a reward model, or a recipe with a reward: it ranks rows in place of writing responses."""
    from dapo.inference.found_model import find_model
    from dapo.ranking.score import is_reward_model

    return Path(model).suffix in (".yaml", ".yml") or is_reward_model(find_model(model).path)


def drift_of_ranker(
    model: str,
    files: Sequence[str],
    overrides: Sequence[str],
    since: str | None,
    curve: Path | None,
    output: Path | None,
) -> None:
    """Its agreement with labels of pairs and rankings, and whether that fell."""
    from dapo.ranking.measures import agreement, summary, summary_lines
    from dapo.ranking.rows import read_candidates
    from dapo.ranking.score import load_ranker, score_rows
    from dapo.util.files import write_json

    if not files:
        raise ConfigError("--data: required but not given: rows of pairs, such as prompt, chosen and rejected")
    require_writable("--output", output)
    reference = [since] if since is not None and Path(since).is_file() else []
    rows = read_candidates([*reference, *files])
    scored = score_rows(load_ranker(model, overrides=overrides), rows)
    told: dict[str, Any] = {"model": model, **summary(rows, scored)}
    if "agreement" not in told:
        raise DataError("no row has two responses that its labels tell apart, so how well the model ranks is not known")
    lines = list(summary_lines(told))
    if since is not None:
        values = told["agreement"]["values"]
        tells = [bool(agreement([row], [several])) for row, several in zip(rows, scored, strict=True)]
        before = sum(tells[: len(read_candidates(reference))]) if reference else None
        split = _since([row.row for row, does in zip(rows, tells, strict=True) if does], since, before)
        found, more = _compared(values, split, curve)
        told |= {"drift": asdict(found)}
        lines += more
    say(lines)
    if output is not None:
        write_json(output, told)


def drift_of_policy(results: Sequence[FileResult], since: str | None, curve: Path | None) -> None:
    """Whether the mean of each row's share of correct samples (or its reward) fell, if that is asked for. The reference
    rows, where they are a file, are the last of ``results``."""
    if since is None:
        return
    groups = [[g for g in result.evaluation.groups if g.scored] for result in results]
    whole = Path(since).is_file()
    groups = [groups[-1], *groups[:-1]] if whole else groups
    every = [group for several in groups for group in several]
    right = all(sample.verdict.correct is not None for group in every for sample in group.scored)
    values = [
        sum(float(bool(s.verdict.correct)) if right else s.verdict.value for s in g.scored) / len(g.scored)
        for g in every
    ]
    split = _since([group.prompt.meta for group in every], since, len(groups[0]) if whole else None)
    say(_compared(values, split, curve)[1])


def _since(rows: Sequence[Any], since_: str, reference: int | None) -> list[bool]:
    """Which rows are new. ``reference``: how many rows at the beginning are not, where a file says so."""
    from dapo.ranking.drift import since

    return since(rows, since_) if reference is None else [place >= reference for place in range(len(rows))]


def _compared(values: Sequence[float], new: Sequence[bool], curve: Path | None) -> tuple[Drift, list[str]]:
    from dapo.ranking.drift import FALSE_ALARMS, compare, read_curve, rows_wanted

    points = None if curve is None else read_curve(curve)
    old, fresh = ([v for v, is_new in zip(values, new, strict=True) if is_new == side] for side in (False, True))
    found = compare(old, fresh)
    told = f"{found.reference.text('.3f')} on {found.rows[0]} reference rows, {found.new.text('.3f')} on "
    lines = [f"{told}{found.rows[1]} new ones: a fall of {found.fall:.3f}, p = {found.p:.4f}"]
    rate = f"a rule that is wrong for at most {FALSE_ALARMS:.0%} of rows that have not changed"
    lines.append(f"retraining is {'due' if found.due else 'not due'}, by {rate}")
    if points is not None and found.due:
        wanted, most = rows_wanted(points, found.reference.value), max(rows for rows, _ in points)
        told = f"the old accuracy takes about {wanted:,} rows (it was made with {most:,})"
        if wanted is None:
            told = "more rows would not bring the old accuracy back: change model or labels"
        lines.append(f"by its learning curve {told}")
    return found, lines
