"""``dapo compare``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from dapo.commands.shared.options import Quiet, is_setting
from dapo.commands.shared.output import columns, print_lines, terminal_width
from dapo.errors import ConfigError


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
    seeds: Annotated[str, typer.Option(metavar="S,S,...", help="Seeds; each is a cell of each recipe.")] = "1,2,3",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the comparison.")] = Path("runs/compare"),
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Run this recipe or cell only.")] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Let recipes differ in this key or section all the same.")
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Evaluate all models by this one; else the first with held-out rows."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Win rates by this one's reward: a judge, a reward model or another."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train by several recipes with the same data, budget and seeds, and put what came of it into one table.

    Each recipe and seed is a run in FOLDER. The same command goes on where it was stopped; what is done stays.
    """
    options: dict[str, Any] = {"minutes": minutes, "samples": samples, "tokens": tokens, "evaluation": evaluation}
    options |= {"seeds": seeds, "only": only or (), "allow": allow or (), "judge": judge}
    if _compare(words, out, options, quiet):
        raise typer.Exit(1)  # a cell failed


def _compare(words: list[str], out: Path, options: dict[str, Any], quiet: bool) -> bool:
    """Run, or read, and print the table. Whether a cell failed."""
    from dapo.api.compare import compare as compare_recipes
    from dapo.commands.train import stopped_by_signals
    from dapo.comparison.folder import is_comparison
    from dapo.comparison.pages import WIN_HEADER, win_lines, write_pages, write_tables
    from dapo.comparison.recipes import BUDGETS
    from dapo.comparison.wins import judge
    from dapo.config.one_value import require_one_value
    from dapo.observe.progress import make_listener

    root, listener = Path(words[0]), make_listener(quiet)
    if len(words) == 1 and is_comparison(root):
        if any(options[name] is not None for name in ("minutes", "samples", "tokens")):
            raise ConfigError(f"{root}: is read as it is; to go on with a comparison name its recipes")
        if options["judge"] is not None:
            judge(root, options["judge"], listener.phase)
        table = write_tables(root)
    else:
        changes = [word for word in words if is_setting(word) and ".yaml" not in word]
        recipes = [word for word in words if word not in changes]
        try:
            options["seeds"] = [int(seed) for seed in options["seeds"].split(",")]
        except ValueError:
            raise ConfigError(f"--seeds {options['seeds']}: expected whole numbers, such as 1,2,3") from None
        named: dict[str, Any] = {f"training.{key}": (f"--{key}", options[key]) for key in BUDGETS}
        require_one_value({"seed": ("--seeds", options["seeds"]), **named}, changes)
        with stopped_by_signals(again="the same command") as shutdown:
            shutdown.run = out
            table = compare_recipes(recipes, changes, out=out, listener=listener, **options)
    with suppress(ImportError):  # there may be no matplotlib
        write_pages(table)
    for header, rows in ((("", *table.names), table.lines()), (WIN_HEADER, win_lines(table))):
        if rows and not quiet:
            print_lines([*columns(header, rows, terminal_width()), ""])
    if not quiet:
        print_lines([*table.failures(), f"table and curves: {table.comparison.root}"])
    return bool(table.failures()) and len(words) > 1
