"""``dapo doctor``: what is wrong with a recipe and all that it names, before a training begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from dapo.commands.shared.options import AsJson, Overrides, Recipe
from dapo.commands.shared.output import print_json, status_line
from dapo.util.terminal import Terminal

if TYPE_CHECKING:
    from dapo.checks.checklist import Entry
    from dapo.checks.context import Finding

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def doctor(
    recipe: Recipe,
    overrides: Overrides = None,
    probe: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Sample and score whole groups for N prompts: are enough of them mixed?"),
    ] = 0,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print what warns, fails or was not checked only.")
    ] = False,
) -> None:
    """Check RECIPE and all that it names: data, model, tokenizer, reward, memory, disk. Starts and writes nothing.

    Each line is pass, warn, fail or skip (what could not be checked), with what to do. Nothing is downloaded. RECIPE
    may be that of a stage (dapo sft, dpo, reward-model); phases are checked by dapo phases --dry-run.

    Exit code 0 without a failure, 2 if recipe or data have one, 1 if only model, reward or machine do.
    """
    from dapo.checks.checklist import examine
    from dapo.checks.context import as_json as told
    from dapo.checks.context import exit_code, not_checked, summary

    stage, checks = _of_stage(recipe)
    console = Terminal()
    findings: list[Finding] = []
    with status_line(quiet or as_json, "reading the recipe") as progress:
        tell = lambda name: progress(f"checking: {name}")  # noqa: E731
        for finding in examine(recipe, overrides or (), probe, tell, stage, checks):
            findings.append(finding)
            if not as_json and (not quiet or finding.status in ("warn", "fail")):
                told_of = Text(finding.line())
                told_of.stylize(_STYLES[finding.status], 0, 4)
                console.print(told_of, soft_wrap=True)
    if as_json:
        print_json(told(findings))
    else:
        for line in (not_checked(findings) if quiet else "", summary(findings)):
            if line:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    code = exit_code(findings)
    if code:
        raise typer.Exit(code)


def _of_stage(recipe: Path) -> tuple[str | None, Sequence[Entry] | None]:
    from dapo.config.plan import existing_recipe
    from dapo.config.stages import stage_named

    if (stage := stage_named(existing_recipe(recipe))) is None:
        return None, None
    from dapo.stages.checks import entries

    return stage, entries()
