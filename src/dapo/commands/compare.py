"""``dapo compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dapo.commands.shared.errors import errors_for_people
from dapo.commands.shared.options import Debug, Quiet, is_setting
from dapo.commands.shared.output import status_line
from dapo.errors import ConfigError
from dapo.util.terminal import Terminal

if TYPE_CHECKING:
    from dapo.comparison.table import Table


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE ...",
            help="Recipes of runs, stages or phases; one with changes of its own in quotes, as in "
            "'no-clip=a.yaml algorithm.clip_ratio_high=0.2'. SECTION.KEY=VALUE changes all of them. Or the folder of a "
            "comparison, to read it.",
        ),
    ],
    minutes: Annotated[float | None, typer.Option(help="Budget of each cell: minutes of steps.")] = None,
    samples: Annotated[int | None, typer.Option(help="Or: samples drawn.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Or: response tokens sampled.")] = None,
    seeds: Annotated[str, typer.Option(metavar="S,S,...", help="Seeds, each a cell of each recipe.")] = "1,2,3",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the comparison.")] = Path("runs/compare"),
    only: Annotated[
        list[str] | None, typer.Option(metavar="CELL", help="Run these only: a recipe's or a cell's name.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Let recipes differ in this key or section all the same.")
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Evaluate the models by this one; else the first with held-out rows."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Win rates by this one's reward: a judge, a reward model or another."),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train by several recipes with the same data, budget and seeds, and put what came of it into one table.

    Each recipe and seed is a run in FOLDER. The same command goes on where it was stopped; what is done stays.
    """
    with errors_for_people(debug, output_is_result=False):
        from dapo.comparison.folder import is_comparison
        from dapo.comparison.table import Table
        from dapo.comparison.wins import judge as judge_answers

        say = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
        budget = {"minutes": minutes, "samples": samples, "tokens": tokens}
        if len(words) == 1 and is_comparison(Path(words[0])):
            out = Path(words[0])
            if given := [key for key, amount in budget.items() if amount is not None]:
                raise ConfigError(
                    f"--{given[0]}: {out} is a comparison that is read; to go on with it name its recipes"
                )
        else:
            _run(words, budget, seeds, out, only or [], allow or [], evaluation, quiet)
        if judge is not None:
            judge_answers(out, judge, tell=say)
        _show(Table.read(out), quiet)


def _run(
    words: list[str],
    budget: dict[str, float | None],
    seeds: str,
    out: Path,
    only: list[str],
    allow: list[str],
    evaluation: str | None,
    quiet: bool,
) -> None:
    from dapo.commands.train import stopped_by_signals
    from dapo.comparison.cells import run_cells
    from dapo.comparison.folder import Comparison
    from dapo.comparison.recipes import named_variants

    changes = [word for word in words if is_setting(word) and " " not in word and ".yaml" not in word]
    recipes = [word for word in words if word not in changes]
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: expected whole numbers, such as 1,2,3") from None
    comparison = Comparison.declare(out, named_variants(recipes, changes), numbers, budget, allow, evaluation)
    with stopped_by_signals(again="the same command") as shutdown, status_line(quiet, "") as working:
        shutdown.run = out
        run_cells(comparison, only, (lambda text: None) if quiet else (lambda text: print(text, flush=True)), working)


def _show(table: Table, quiet: bool) -> None:
    """Write the files, and print the table. Raises UserError: the files cannot be written."""
    from rich.table import Table as Drawn

    from dapo.comparison.pages import WIN_HEADER, draw, sections_of, win_lines, write_tables
    from dapo.util.pages import write_report

    files, root = write_tables(table), table.declared.root
    try:
        title = f"Comparison of {', '.join(table.names)}"
        files = [*write_report(title, sections_of(table, draw(table)), root / "report"), *files]
    except ImportError:  # no matplotlib
        pass
    if quiet:
        return
    console = Terminal()
    for header, rows in ((("", *table.names), table.lines()), (WIN_HEADER, win_lines(table))):
        drawn = Drawn(*header, show_edge=False)
        for row in rows:
            drawn.add_row(*row)
        if rows:
            console.print(drawn)
    for text in (*table.failures(), *map(str, files)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
