"""``dapo data check``, ``dapo data clean`` and ``dapo data receive``."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared.errors import EXIT_CODES, errors_for_people
from dapo.commands.shared.options import Debug, DrainSeconds, Host, JsonFile, Port, Quiet, Redact, TokenEnv, is_setting
from dapo.commands.shared.output import columns, print_lines, require_writable, say, status_line, write_results
from dapo.errors import ConfigError, extra
from dapo.util.terminal import counted, visible

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.config.data import DataItem
    from dapo.data.check import CheckReport, FileReport, Measure

app = typer.Typer(no_args_is_help=True, help="Check and clean data files; take prompts and feedback over HTTP.")
_BAR = 40


@app.command(epilog=EXIT_CODES)
def check(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES] [SECTION.KEY=VALUE]", help="Files to train on; keys of the config to change."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--eval", metavar="FILE", help="To evaluate on: the others must not overlap with it. May be given again."
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Keys, template, tokenizer and reward of this recipe; its own files if none are named."),
    ] = None,
    output: JsonFile = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 2 for overlap and conflicting answers, too.")
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Read every row of FILES: bad rows, missing answers, duplicates, lengths, overlap with evaluation files.

    Bad rows are exit code 2; overlap and conflicting answers are warnings, unless --strict is given. Answers that are
    whole solutions, or the same in all rows looked at, are warnings. Results are kept, so that a second check of the
    same files takes no time. With model.tokenizer=PATH, or a recipe, lengths are in tokens.
    """
    with errors_for_people(debug):
        from dapo.data.check import check_data
        from dapo.reward.build import needs_answer
        from dapo.util.escapes import eaten_in

        config = _config(recipe, words or [], against or [])
        train, evaluation = _files(config, recipe, words or [], against or [])
        every = (*train, *evaluation)
        if output is not None:
            require_writable("--json", output, [item.path for item in every])
        measure, needed = _measure(config, recipe), needs_answer(config.reward)
        required = None if needed and recipe is None else needed
        with status_line(quiet, "reading") as told:
            found = check_data(train, evaluation, config.data, measure, answer_required=required, progress=told)
        doubts = eaten_in(config.model_dump(mode="json"))
        doubts += [line for item in every for line in _answers(config, item)]
        say(report_lines(found, config, doubts))
        if output is not None:
            write_results(output, {**found.as_json(), "answers": doubts})
        if found.bad or (strict and found.doubts):
            raise typer.Exit(2)


@app.command(epilog=EXIT_CODES)
def clean(
    words: Annotated[
        list[str],
        typer.Argument(metavar="FILES OUT [SECTION.KEY=VALUE]", help="Files to read; the JSON lines to write."),
    ],
    against: Annotated[
        list[str] | None,
        typer.Option("--eval", metavar="FILE", help="Leave out rows that overlap with it. May be given again."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Keys and reward of this recipe.")] = None,
    fractions: Annotated[
        bool, typer.Option("--fractions", help="Where the answer is a fraction m/n, ask for m + n, as the paper does.")
    ] = False,
    output: JsonFile = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the rows of FILES to OUT, but for those that are bad, repeated, contradictory or overlap with --eval.

    Control characters are mended where it is plain what was meant, and answers that the math reward takes for an
    integer are written as one. --json FILE has what was done to each row, and why.
    """
    with errors_for_people(debug):
        from dapo.config.data import DataItem
        from dapo.data.clean import KINDS, clean_data, write_rows

        *names, target = [word for word in words if not is_setting(word)] or [""]
        if not names:
            raise ConfigError("name the files to read and last the file to write: dapo data clean rows.jsonl out.jsonl")
        out, config = Path(target), _config(recipe, words, against or [])
        if (there := out.exists() or out.is_symlink()) or out.suffix != ".jsonl":
            why = "it exists already" if there else "its name has to end in .jsonl"
            raise ConfigError(f"{target}: cannot be written: {why}")
        if output is not None:
            require_writable("--json", output, (*names, target))
        require_writable("OUT", out)
        items = [DataItem(path=name) for name in names]
        held = [DataItem(path=name) for name in against] if against else config.evaluation.data
        with status_line(quiet, "reading") as told:
            same = _verifier(config)
            rows, report = clean_data(items, held, config.data, same, fractions=fractions, progress=told)
        write_rows(out, rows, config.data.prompt_key, config.data.answer_key)
        table = [[KINDS[kind], f"{count:,}"] for kind, count in report.counts.items() if count]
        print_lines([*columns(["what was done", "rows"], table), ""] if table else [])
        print_lines([f"{report.written:,} of {report.read:,} rows are in {target}"])
        if output is not None:
            write_results(output, asdict(report))


@app.command(epilog=EXIT_CODES)
def receive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines to append to, for data.live of a run.")],
    redact: Redact = None,
    host: Host = "127.0.0.1",
    port: Port = 8010,
    token_env: TokenEnv = None,
    drain_s: DrainSeconds = 5.0,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Take prompts and feedback from an application over HTTP and append them to FILE.

    POST /v1/prompts has prompt, consent ("training") and, as needed, answer and id; POST /v1/feedback has id and one of
    thumbs, edit and outcome.
    """
    with errors_for_people(debug):
        with extra("server", "dapo data receive"):
            from dapo.serve.live import Journal
            from dapo.serve.live import receive as take
            from dapo.util.serving import Address
        require_writable("FILE", file)
        tell = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
        address = Address(host, port, Address.token_in(token_env))
        asyncio.run(take(Journal(file, redact), address, drain_s=drain_s, say=tell))


def _verifier(config: Config) -> Callable[[str, str], bool] | None:
    """Whether the recipe's reward takes the second answer for the first; None: it is another one than `math`."""
    from dapo.reward.math.score import score_math

    if config.reward.kind != "math":
        return None
    return lambda gold, answer: bool(score_math(f"\\boxed{{{answer}}}", gold, ["boxed"]).correct)


# --- what was asked for -------------------------------------------------------------------------------------------


def _config(recipe: Path | None, words: Sequence[str], against: Sequence[str]) -> Config:
    from dapo.config import load_config
    from dapo.config.one_value import require_one_value
    from dapo.config.reading import config_of_overrides

    overrides = [word for word in words if is_setting(word)]
    require_one_value({"evaluation.data": ("--eval", against)}, overrides)
    return load_config(recipe, overrides) if recipe else config_of_overrides(overrides)[0]


def _files(
    config: Config, recipe: Path | None, words: Sequence[str], against: Sequence[str]
) -> tuple[list[DataItem], list[DataItem]]:
    """Raises ConfigError: there is nothing to check."""
    from dapo.config.data import DataItem

    named = [DataItem(path=word) for word in words if not is_setting(word)]
    compared = [DataItem(path=file) for file in against]
    if recipe is not None and not named and not compared:
        return config.data.train, config.evaluation.data
    train = named or (config.data.train if recipe is not None and compared else [])
    if not train and not compared:
        raise ConfigError("no files are named; give FILES, or --recipe with files in data.train")
    return train, compared or (config.evaluation.data if recipe is not None else [])


def _measure(config: Config, recipe: Path | None) -> Measure:
    """With the tokenizer that was named, or the recipe's. It is loaded only if a file was not checked before."""
    from dapo.data.check import Measure, prompt_identity

    name = config.model.tokenizer or (recipe and config.model.path)
    if not name:
        return Measure()
    data = config.data
    unnamed = "template" not in data.model_fields_set

    def load() -> Any:
        from dapo.data.template import PromptTemplate
        from dapo.model.loading import load_tokenizer

        found = load_tokenizer(str(name), config.model.trust_remote_code)
        if unnamed and not getattr(found, "chat_template", None) and data.chat_template is None:
            return PromptTemplate(data.model_copy(update={"template": "plain"}), found)
        return PromptTemplate(data, found)

    return Measure(load, prompt_identity(data, str(name), unnamed))


def _answers(config: Config, item: DataItem) -> list[str]:
    """What a training would warn of in a file's answers, from a look at some of the rows that can be read."""
    from dapo.checks.answers import LOOKED_AT, doubts_about, spread
    from dapo.data.parts import Part, Rows, keys_of, open_table
    from dapo.data.rows import BadRow
    from dapo.records import Prompt

    rows = Rows([Part(open_table(item), keys_of(item, config.data, answer_required=False), item.path)])
    prompts = []
    for number in spread(range(len(rows)), LOOKED_AT):
        with contextlib.suppress(BadRow):  # it has been told of
            row = rows[number]
            prompts.append(Prompt(number, row.text, (), row.answer))
    return doubts_about(config, item, prompts)


# --- what is said -------------------------------------------------------------------------------------------------


def report_lines(found: CheckReport, config: Config, doubts: Sequence[str] = ()) -> Iterator[str]:
    """``doubts``: about the answers."""
    short = _short(found)
    for title, reports in (("Files to train on", found.train), ("Files to evaluate on", found.evaluation)):
        if reports:
            yield from _block(title, _table(reports, short))
    for report in (*found.train, *found.evaluation):
        if report.bad:
            yield from _block(f"Bad rows of {report.file}: {report.bad:,}", report.faults)
        for what, (count, examples) in report.doubts.items():
            yield from _block(f"warning: {count:,} rows of {report.file} {what}, such as", map(visible, examples))
    for title, reports in (("training", found.train), ("evaluation", found.evaluation)):
        if reports:
            yield from _histogram(title, reports, config.data.max_prompt_length)
    if found.between:
        rows = [[short(p.file), short(p.other), f"{p.exact:,}", f"{p.conflicts:,}"] for p in found.between]
        title = "Equal prompts in two files to train on (rows of the first one)"
        yield from _block(title, columns(["file", "also in", "rows", "with another answer"], rows))
    if found.conflicts:
        yield from _block("One prompt, two answers, such as", found.conflicts)
    if found.train and found.evaluation:
        yield from _overlap(found, short)
    yield from (f"warning: {line}" for line in doubts)
    yield _verdict(found)


def _block(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield title
    yield from (f"  {line}" for line in lines)
    yield ""


def _short(found: CheckReport) -> Callable[[str], str]:
    """Names for tables: those of the files alone, where they are all different."""
    names = [report.file for report in (*found.train, *found.evaluation)]
    alone = {Path(name).name for name in names}
    return (lambda name: Path(name).name) if len(alone) == len(set(names)) else str


def _table(reports: Sequence[FileReport], short: Callable[[str], str]) -> Iterable[str]:
    unit = reports[0].lengths.unit
    header = ["file", "rows", "bad", "no answer", "repeated", "conflicts", "too long"]
    header += [f"{unit}: median", "95%", "longest"]
    rows = [
        [
            short(report.file),
            *(f"{n:,}" for n in (report.rows, report.bad, report.missing_answers, report.duplicates, report.conflicts)),
            "-" if report.too_long is None else f"{report.too_long:,}",
            *(f"{report.lengths.at(share):,}" for share in (0.5, 0.95, 1.0)),
        ]
        for report in reports
    ]
    return columns(header, rows)


def _histogram(title: str, reports: Sequence[FileReport], limit: int) -> Iterator[str]:
    from dapo.data.check import Lengths

    unit = reports[0].lengths.unit
    lengths = Lengths(unit, sum((report.lengths.counts for report in reports), Counter()))
    bins = lengths.histogram()
    if not bins:
        return
    said = f" (longer than {limit}: {lengths.above(limit):,})" if unit == "tokens" else ", as no tokenizer was named"
    most = max(count for _, _, count in bins)
    width = max(len(f"{low}-{high}") for low, high, _ in bins)
    bars = (
        f"{f'{low}-{high}':>{width}}  {count:>9,}  {'#' * -(-count * _BAR // most)}".rstrip()
        for low, high, count in bins
    )
    yield from _block(f"Length of {title} prompts in {unit}{said}", bars)


def _overlap(found: CheckReport, short: Callable[[str], str]) -> Iterator[str]:
    if not found.overlap:
        yield from _block("Overlap with files to evaluate on: none (neither equal prompts nor 13 words in a row)", [])
        return
    title = "Overlap with files to evaluate on: rows to train on that hold the same prompt, or 13 words in a row of one"
    rows = [[short(pair.file), short(pair.other), f"{pair.exact:,}", f"{pair.near:,}"] for pair in found.overlap]
    examples = [example for pair in found.overlap for example in pair.examples[:2]]
    yield from _block(title, [*columns(["file", "evaluation file", "same", "13 words"], rows), *examples])


def _verdict(found: CheckReport) -> str:
    rows = sum(report.rows for report in (*found.train, *found.evaluation))
    exact, near = sum(p.exact for p in found.overlap), sum(p.near for p in found.overlap)
    conflicts = sum(r.conflicts for r in found.train) + sum(p.conflicts for p in found.between)
    parts = [f"{rows:,} rows in {counted(len(found.train) + len(found.evaluation), 'file')}", f"{found.bad:,} bad"]
    parts += [f"{conflicts:,} conflicting answers"] if conflicts else []
    if exact or near:
        parts.append(f"warning: {exact:,} equal and {near:,} similar prompts stand in files to evaluate on")
    return "; ".join(parts)
