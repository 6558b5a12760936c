"""``dapo votes``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dapo.commands.shared.output import columns, print_lines
from dapo.errors import UserError

if TYPE_CHECKING:
    from dapo.evaluation.votes import Tally


def votes(
    run: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="Run folder, or a file of dapo serve --live.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write preference pairs (prompt, chosen, rejected) there, as JSON lines."),
    ] = None,
) -> None:
    """Say which of a run's models people prefer, by the votes that were cast in dapo ui. Of a file of
    dapo serve --live, the responses with a thumb up and those with a thumb down become pairs, and
    each edit with the response that it mends.

    The interval is of 95%, over the votes that found one answer better than the other.
    """
    from dapo.evaluation.votes import live_pairs, preference_pairs, read_votes, tallies, write_pairs
    from dapo.observe.run_view import RunView

    if run.is_file():
        pairs = list(live_pairs(run))
        print(f"{len(pairs)} pairs of thumbs and edits" + (f" in {output}" if output else ""))
        if output is not None:
            write_pairs(pairs, output)
        return
    root = RunView.read(run).folder.root
    found = read_votes(root)
    if not found:
        raise UserError(f"{run}: there are no votes; dapo ui offers blind comparisons, which make them")
    told = tallies(found)
    header = ["second against first", "first", "second", "tie", "both bad", "second preferred", "95% interval"]
    print_lines(columns(header, [_row(tally) for tally in told]))
    print_lines(f"{tally.models[1]} against {tally.models[0]}: {tally.verdict}" for tally in told)
    if output is not None:
        print(f"{write_pairs(list(preference_pairs(found)), output)} pairs of {len(found)} votes in {output}")


def _row(tally: Tally) -> list[str]:
    counts = [str(count) for count in (tally.first, tally.second, tally.ties, tally.both_bad)]
    share = tally.share
    estimate = ["-", "-"] if share is None else [f"{share.value:.0%}", f"{share.low:.0%} to {share.high:.0%}"]
    return [f"{tally.models[1]} against {tally.models[0]}", *counts, *estimate]
