"""``dapo reward check`` and ``dapo reward score``: is the reward right, and what would another one have said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared.errors import EXIT_CODES, for_people
from dapo.commands.shared.options import JsonFile, Run, files_and_settings, step_range
from dapo.commands.shared.output import print_lines, require_writable, status_line, write_results
from dapo.errors import ConfigError
from dapo.util.terminal import counted, warn

if TYPE_CHECKING:
    from dapo.config import Config, RewardConfig
    from dapo.observe.run_view import RunView

app = typer.Typer(no_args_is_help=True, help="Check a reward against labelled cases; score a run's samples again.")

_Keys = Annotated[list[str] | None, typer.Argument(metavar="[REWARD.KEY=VALUE]", help="Keys of the reward to change.")]
_Steps = Annotated[str, typer.Option("--steps", "--step", metavar="N|A:B|all", help="Samples of these steps.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no times.")]


@app.command(epilog=EXIT_CODES)
@for_people
def check(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|KIND", help="A recipe, of which the reward section is used; or math, code, exact."
        ),
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES [REWARD.KEY=VALUE]", help="Labelled cases (JSONL); keys of the reward to change."
        ),
    ],
    tolerance: Annotated[
        float, typer.Option(min=0, metavar="X", help="How far a reward may be from an expected number.")
    ] = 1e-9,
    output: JsonFile = None,
    quiet: _Quiet = False,
) -> None:
    """Score labelled cases and print every disagreement; exit code 0 only if all agree, 1 if not.

    A case is {"gold": "4", "response": "It is 4.", "expected": true}, where expected may be false or a number, too; or,
    for code, {"solution": "...", "tests": [...], "expected": "pass"}, or fail, timeout, error.
    """
    from dapo.commands.reward.report import disagreement
    from dapo.config import load_reward
    from dapo.reward.check import check_cases, read_cases

    files, overrides = files_and_settings(words)
    if not files or reward.endswith(".jsonl"):
        text = f"{reward!r} is taken for the recipe or kind of reward, which comes before FILES of labelled cases"
        raise ConfigError(f"{'' if files else 'no files are named: '}{text}: dapo reward check math FILE.jsonl")
    config = load_reward(reward, overrides)
    cases = read_cases(files, config)
    require_writable("--json", output, files)
    started = time.perf_counter()
    with status_line(quiet, "starting") as progress:
        checked = asyncio.run(
            check_cases(cases, config, tolerance, lambda done: progress(f"{done:,} of {len(cases):,} cases"))
        )
    seconds = time.perf_counter() - started
    agreed = sum(one.agrees for one in checked)
    for one in checked:
        if not one.agrees:
            print_lines([*disagreement(one), ""])
    found = {"reward": _told(config), "cases": len(cases), "agree": agreed, "seconds": round(seconds, 3)}
    write_results(output, {**found, "verdicts": [one.as_json() for one in checked]})
    _print_speed(quiet, len(cases), "case", seconds)
    print(f"agree {agreed} of {len(cases)}")
    if agreed < len(cases):
        raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
@for_people
def score(
    run: Run,
    words: _Keys = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE|KIND",
            help="What to score with: a recipe, or math, exact, ...; by default the run's own reward.",
        ),
    ] = None,
    steps: _Steps = "all",
    examples: Annotated[int, typer.Option(min=0, help="Show at most so many samples that changed.")] = 6,
    output: JsonFile = None,
    quiet: _Quiet = False,
) -> None:
    """Score the stored samples of RUN again with another reward, and show what changes. RUN itself stays as it is.

    With the run's own reward it shows whether its verdicts can be reproduced.
    """
    from dapo.commands.reward.report import Summary
    from dapo.commands.reward.rescore import StepChange, StoredRows, rescore
    from dapo.config import load_config
    from dapo.observe.run_view import RunView
    from dapo.observe.sample_query import steps_asked_for

    files, overrides = files_and_settings(words)
    if files:
        raise ConfigError(f"{files[0]}: expected reward.key=value; the reward is named by --reward")
    view = RunView.read(run)
    wanted = steps_asked_for(view, (0, 10**9) if steps == "all" else step_range(steps) or (0, 0))
    config = load_config(view.folder.config)
    chosen = _chosen(view, config, reward, overrides)
    require_writable("--json", output, [view.folder.config])
    rows = StoredRows(config, chosen, warn)
    summary = Summary(examples)
    told: list[dict[str, Any]] = []

    def hear(change: StepChange) -> None:
        summary.add(change)
        if output is not None:
            told.append(change.as_json())

    started, numbers = time.perf_counter(), count(1)
    with status_line(quiet, "starting") as progress:

        def advance(step: int) -> None:
            progress(f"step {step}, {next(numbers):,} samples")

        asyncio.run(rescore(view.folder, wanted, chosen, config, rows, hear, advance))
    seconds = time.perf_counter() - started
    print(f"{run}: reward {config.reward.kind}, scored again with {reward or 'its own'} ({chosen.kind})\n")
    print_lines(summary.lines())
    found = {"run": str(run), "reward": _told(chosen), "seconds": round(seconds, 3)}
    write_results(output, {**found, "steps": told})
    _print_speed(quiet, next(numbers) - 1, "sample", seconds)
    print(summary.verdict())


def _chosen(view: RunView, config: Config, reward: str | None, overrides: Sequence[str]) -> RewardConfig:
    """The reward that ``--reward`` names, or the run's own; warns where that has changed since the run started.
    Raises ConfigError: there is no such reward, or the run was trained on a Python function."""
    from dapo.config import load_reward

    if reward is not None:
        return load_reward(reward, overrides)
    if view.reward_from_python is not None:
        raise ConfigError(
            f"{view.folder.root}: was trained on a Python function ({view.reward_from_python}), which the folder "
            "does not hold; name a reward with --reward, such as file.py's in a recipe"
        )
    chosen = load_reward(view.folder.config, overrides)
    for line in view.changes_of_reward(config):
        warn(f"the reward is not the one that the run started with: {line}")
    return chosen


def _print_speed(quiet: bool, done: int, noun: str, seconds: float) -> None:
    if not quiet:
        print(f"{counted(done, noun, ',')} in {seconds:.1f} s, {done / seconds:,.0f} per second")


def _told(config: RewardConfig) -> Any:
    from dapo.config.secrets import redact

    return redact(config.model_dump(mode="json"))
