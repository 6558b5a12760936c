"""``dapo evaluate``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dapo.commands.shared import options
from dapo.commands.shared.output import require_writable
from dapo.errors import ConfigError
from dapo.util.terminal import Terminal, counted

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.inference.evaluate import FileResult


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILES] [SECTION.KEY=VALUE]", help="Further data files, and keys of the config to change."),
]
Data = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="Rows to evaluate on; several files are evaluated one by one.")
]
Benchmark = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Prompt, answer rule and sampling of gsm8k, math500, aime or amc, or of your file.py:name."
    ),
]
Recipe = Annotated[
    Path | None, typer.Option(help="Template, reward and sampling of this recipe; a run's own is found by itself.")
]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Sample on this OpenAI-compatible server; MODEL needs no weights then."),
]
SaveSamples = Annotated[
    bool, typer.Option("--save-samples", help="Write every response, too, as JSON lines beside the results.")
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="DATE|FILE",
        help="Say whether rows since DATE (by their time), or all against those of FILE, are worse.",
    ),
]
Curve = Annotated[
    Path | None, typer.Option(metavar="RUN", help="With --since: learning curve, of dapo reward-model --curve.")
]
OutputPath = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Write the results as JSON: a folder, or a file named *.json.")
]


def evaluate(
    model: options.Model,
    words: Words = None,
    data: Data = None,
    benchmark: Benchmark = None,
    recipe: Recipe = None,
    samples: Annotated[int | None, typer.Option(metavar="K", help="Samples of each prompt.")] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    server: Server = None,
    rows: Annotated[int | None, typer.Option(metavar="N", help="The first so many rows of each file.")] = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    since: Since = None,
    curve: Curve = None,
    output: OutputPath = None,
    save_samples: SaveSamples = False,
    average: Annotated[bool, typer.Option("--average", help="Give the mean over the files, too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the results only.")] = False,
) -> None:
    """Measure MODEL on files of prompts with answers: avg@k, pass@k, maj@k, each with its interval.

    A reward model, or a recipe with a reward, is measured on rows of pairs or rankings. What counts is, from the
    weakest to the strongest: defaults, the recipe, the benchmark, options and keys.
    """
    from dapo.commands.drift import drift_of_policy, drift_of_ranker, ranks
    from dapo.evaluation.benchmarks import benchmark_named
    from dapo.inference.model import settings_for
    from dapo.observe.progress import make_listener

    given = options.given_options(locals(), *options.SAMPLING, "rows", "server")
    more, overrides = options.files_and_settings(words)  # --data a.jsonl b.jsonl seed=3 names two files
    given["--data"] = [*(data or []), *more]
    if ranks(model):
        _refuse(given | options.given_options(locals(), "benchmark", "recipe", "average", "save_samples"))
        return drift_of_ranker(model, given["--data"], overrides, since, curve, output)
    given["--data"] += [since] if since and Path(since).is_file() else []
    preset = benchmark_named(benchmark) if benchmark else None
    benchmarks = [preset.settings] if preset else []
    found, config = settings_for(model, given, *benchmarks, recipe=recipe, overrides=overrides)
    _check_data(config)
    place, trained = _place(output, save_samples), recipe or found.recipe
    about = {"recipe": trained and str(trained), "benchmark": preset and preset.name, "server": server}
    about |= _hash_of(benchmark)
    with closing(make_listener(quiet, Terminal(stderr=True))) as listener:
        _tell(listener, model, found, trained, preset, config)
        from dapo.inference.evaluate import average_of, evaluate_files, report

        def write(config: Config, results: Sequence[FileResult]) -> dict[str, Any]:
            found = report(config, results, about, sys.argv)
            found |= {"average": average_of(results)} if average else {}
            if place is not None:
                _write(place, found, results, save_samples)
            return found

        results, notes = evaluate_files(config, listener, write, preset.published if preset else None)
    _show(Terminal(), results, notes)
    drift_of_policy(results, since, curve)


def _refuse(given: Mapping[str, Any]) -> None:
    """Raises ConfigError: there is an option for policies alone."""
    for option, value in given.items():
        if option != "--data" and value is not False and value not in (None, []):
            raise ConfigError(f"{option}: is for policies, and a ranker is measured here; leave it out")


def _hash_of(benchmark: str | None) -> dict[str, str]:
    """Of a benchmark of the user's, its file."""
    from dapo.util.files import file_hash

    own = benchmark is not None and ".py:" in benchmark
    return {"benchmark_sha256": file_hash(Path((benchmark or "").rpartition(":")[0]))} if own else {}


def _tell(listener: Any, model: str, found: Any, trained: Path | None, preset: Any, config: Config) -> None:
    from dapo.inference.model import function_of

    named: dict[str, Any] = {f"{model}: its model is": found.path if found.path != model else None}
    named |= {"settings of the recipe": trained, "benchmark": preset and preset.name}
    for what in filter(named.get, named):
        listener.phase(f"{what} {named[what]}")
    if trained == found.recipe and preset is None and (why := function_of(found)):
        listener.warning(f"{why}: judged here by reward.kind={config.reward.kind}")


def _check_data(config: Config) -> None:
    """Raises ConfigError if no file is named, or one twice, and DataError if one does not exist."""
    from dapo.config.plan import require_files

    files = [item.path for item in config.evaluation.data]
    if not files:
        raise ConfigError("--data: required but not given: files of rows with a prompt and an answer each")
    twice = [item.path for item in config.evaluation.data if config.evaluation.data.count(item) > 1]
    if twice:
        raise ConfigError(f"--data: {twice[0]} is named twice")
    require_files(config)


def _place(output: Path | None, save_samples: bool) -> Path | None:
    """Where the results go, tried before anything is computed. Raises UserError if it cannot be written to, ConfigError
    if samples have none."""
    if output is None:
        if save_samples:
            raise ConfigError("--save-samples: needs a place; use --output FOLDER")
        return None
    is_file = output.suffix == ".json" and not output.is_dir()
    place = output if is_file else output / "evaluation.json"
    require_writable("--output", place)
    return place


def _write(place: Path, report: Mapping[str, Any], results: Sequence[FileResult], save_samples: bool) -> None:
    """evaluation.json and, if asked for, samples-NAME.jsonl beside it; earlier ones are replaced."""
    from dapo.util.files import json_line, write_atomic, write_json, writing

    with writing(place.parent):
        write_json(place, report)
        for result in results if save_samples else ():
            path = place.with_name(f"samples-{result.name}.jsonl")
            write_atomic(path, map(json_line, result.evaluation.sample_lines()))


def _show(console: Console, results: Sequence[FileResult], report: Mapping[str, Any]) -> None:
    for result, found in zip(results, report["files"], strict=True):
        title = f"{result.name}: {counted(found['prompts'], 'prompt')}"
        table = Table("", "", "95% interval", title=title, title_justify="left")
        for name, estimate in found["metrics"].items():
            if name not in ("pass@1", "maj@1"):  # the same as avg@k
                table.add_row(name, *_estimate(name, estimate))
        for name, value in found["own"].items():
            table.add_row(name, f"{value:.4g}", "-")
        for name, share in found["shares"].items():
            if name in _SHARES and (share or name != "failed"):
                table.add_row(_SHARES[name], f"{share:.1%}")
        table.add_row("response length, tokens", f"{result.evaluation.response_length:.1f}")
        console.print(table)
        speed = f"{result.seconds:.1f} s, {found['tokens_per_second']:.0f} tokens/s"
        console.print(speed, style="dim", highlight=False)
        for count, what in (
            (found["prompts_unscored"], "without any verdict: left out"),
            (found["prompts_short"], "with fewer verdicts than samples: pass@j and maj@j over those they have"),
        ):
            if count:
                console.print(f"{counted(count, 'prompt')} {what}", highlight=False)
    if "average" in report:
        value = report["average"]
        mean = "-" if value is None else f"{value:.1%}"
        console.print(f"mean over {counted(len(results), 'file')}: {mean}", highlight=False)


_SHARES = {
    "wrong": "answered, but wrong",
    "no_answer": "no answer found",
    "lenient": "right, or its last number is",
    "truncated": "cut at the limit",
    "failed": "scores that failed",
}
"""What the table says of a share."""


def _estimate(name: str, estimate: Mapping[str, float | None]) -> tuple[str, str]:
    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:+.3f}" if name == "reward" else f"{value:.1%}"

    low, high = text(estimate["low"]), text(estimate["high"])
    return text(estimate["value"]), "-" if low == high == "-" else f"{low} to {high}"
