"""``dapo evaluate`` without its printing: a model on files of prompts, each file a benchmark of its own.

Consumes: a config and files. Produces: a :class:`FileResult` for each, and all of them as one JSON-able report. Waits
for the engine and the scorer, one file after the other."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dapo.checks.answers import doubts_about
from dapo.checks.start import examine_rows
from dapo.config import Config
from dapo.config.data import DataItem
from dapo.config.reading import with_values
from dapo.config.secrets import redact
from dapo.config.user_parts import own_metrics
from dapo.data.parts import open_table
from dapo.data.rows import BadRow, Keys, listed
from dapo.data.source import read_prompts
from dapo.environments.player import player_for, scores_itself
from dapo.errors import DataError
from dapo.evaluation.benchmarks import Published
from dapo.evaluation.evaluate import evaluate
from dapo.evaluation.result import Evaluation
from dapo.inference.model import Prompting, doubts, label_of, load_engine, load_prompting, remote_engine, settings_lines
from dapo.observe.progress import Listener
from dapo.observe.run_folder import describe_environment
from dapo.orchestrator.inputs import RunOverrides
from dapo.records import Prompt
from dapo.reward.build import make_scorer, needs_answer
from dapo.rollout.engine import Engine
from dapo.util.asynchronous import run_async
from dapo.util.escapes import eaten_in
from dapo.util.files import file_hash


@dataclass(frozen=True, slots=True)
class FileResult:
    """What came of one file. ``name``: short and different from those of the other files."""

    name: str
    file: str
    evaluation: Evaluation
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(s.length for g in self.evaluation.groups for s in g.samples)

    def as_json(self) -> dict[str, Any]:
        """See :meth:`Evaluation.as_json`; with the file, its fingerprint and what it took."""
        return {
            "name": self.name,
            "file": self.file,
            "sha256": file_hash(Path(self.file)) if Path(self.file).is_file() else None,
            "seconds": round(self.seconds, 2),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else None,
            **self.evaluation.as_json(),
        }


Report = TypeVar("Report")


def evaluate_files(
    config: Config,
    listener: Listener,
    write: Callable[[Config, Sequence[FileResult]], Report],
    published: Published | None = None,
    inputs: RunOverrides | None = None,
) -> tuple[list[FileResult], Report]:
    """Evaluate ``config.model`` on each item of ``evaluation.data``, exactly the rows given (the first
    ``evaluation.rows`` of each).
    ``write``: called after each item with the results so far, so that nothing that goes wrong later can spoil them, and
    with the config that has the picked template in it. ``published``: how rows are read that are as the benchmark's
    authors publish them; others are read as ever. ``inputs``: ``model``, ``tokenizer``, ``heldout`` (rows, under the
    name of the only item) and ``reward`` of a Python caller, in place of what the config names.
    Returns the results in the order of the items, and what ``write`` last returned.
    Raises UserError: something in model, data or reward is wrong; rows that are too long are among it."""
    listener.phase("loading tokenizer and data")
    inputs = inputs or RunOverrides()
    config = _keys_as_published(config, published) if published else config
    prompting = load_prompting(config, inputs.model, inputs.tokenizer)
    config = prompting.config
    items = config.evaluation.data
    prompts = {label_of(item): _prompts(prompting, item, listener, inputs) for item in items}
    if published and config.reward.kind in ("math", "exact"):  # any other may want the solution
        prompts = {file: _bare_answers(file, found, published, listener) for file, found in prompts.items()}
    _tell(prompting, prompts, listener, inputs)
    wanted = max(map(len, prompts.values())) * config.evaluation.samples_per_prompt
    metrics = own_metrics(config, inputs.metrics)
    if config.rollout.engine == "openai":
        engine: Engine = remote_engine(prompting, prompts)
    else:
        listener.phase("loading the model")
        engine = load_engine(prompting, prompts, wanted, listener)

    async def run() -> tuple[list[FileResult], Report]:
        results = []
        scorer = make_scorer(prompting.config.reward, inputs.reward)
        async with contextlib.AsyncExitStack() as resources:  # each is closed whatever becomes of the other
            resources.push_async_callback(scorer.close)
            resources.push_async_callback(engine.close)
            await scorer.start()
            for file, found in prompts.items() if not scores_itself(config) else ():
                await examine_rows(file, found, scorer, listener)
            for (file, found), name in zip(prompts.items(), short_names(list(prompts)), strict=True):
                listener.phase(f"evaluating on {name}: {len(found)} rows")
                started = time.perf_counter()
                work = (found, engine, scorer, prompting.template.decode)
                player = player_for(config, prompting.template, evaluation=True)
                evaluation = await evaluate(*work, config, listener.advance, metrics, player)
                results.append(FileResult(name, file, evaluation, time.perf_counter() - started))
                listener.evaluated(name, evaluation.metrics())
                written = write(prompting.config, results)
        return results, written

    return run_async(run)


def _tell(
    prompting: Prompting, prompts: Mapping[str, Sequence[Prompt]], listener: Listener, inputs: RunOverrides
) -> None:
    """How it is done, by the settings and the first prompt, and what may be wrong with rows and settings."""
    for line in settings_lines(prompting.config):
        if inputs.reward is None or not line.startswith("reward"):
            listener.phase(line)
    first = next(iter(prompts.values()))[0]
    answer = "" if first.answer is None else f", whose answer is {first.answer[:60]!r}"
    listener.phase(f"a prompt as the model sees it: {prompting.template.show(first)}{answer}")
    eaten = eaten_in(prompting.config.model_dump(mode="json"))
    for said in (*eaten, *doubts(prompting, prompts)):
        listener.warning(said)
    for item in prompting.config.evaluation.data if inputs.reward is None else ():
        for doubt in doubts_about(prompting.config, item, prompts[label_of(item)]):
            listener.warning(doubt)


def _prompts(prompting: Prompting, item: DataItem, listener: Listener, inputs: RunOverrides) -> tuple[Prompt, ...]:
    """Raises DataError: a row is bad, or longer than ``data.max_prompt_length``."""
    config = prompting.config
    limit = config.data.max_prompt_length
    prompts = read_prompts(
        config.data,
        [item] if inputs.heldout is None else inputs.heldout,
        prompting.template,
        answer_required=inputs.reward is None and not scores_itself(config) and needs_answer(config.reward),
        limit=config.evaluation.rows,
        warn=lambda text: listener.warning(f"{label_of(item)}: {text}"),
    )
    if not prompts:
        raise DataError(f"{label_of(item)}: holds no rows")
    longest = max(prompts, key=lambda p: len(p.token_ids))
    if (size := len(longest.token_ids)) > limit:
        text = (
            f"{label_of(item)}, row {longest.row + 1}: the prompt has {size} tokens, more than data.max_prompt_length="
        )
        raise DataError(f"{text}{limit}; an evaluation leaves no row out: use data.max_prompt_length={size}")
    return prompts


def _keys_as_published(config: Config, published: Published) -> Config:
    """With the authors' key of the prompt for items whose first row has it and no ``prompt``, if no other is named."""
    usual, theirs = Keys().prompt, published.prompt_key
    items = []
    for item in config.evaluation.data:
        row: Any = {}
        if (item.prompt_key or config.data.prompt_key) == usual:
            with contextlib.suppress(BadRow):  # which is told of when all rows are read
                row = open_table(item).raw(0)
        found = isinstance(row, Mapping) and theirs in row and usual not in row
        items.append(item.model_copy(update={"prompt_key": theirs}) if found else item)
    return with_values(config, {"evaluation.data": items})


def _bare_answers(
    file: str, prompts: tuple[Prompt, ...], published: Published, listener: Listener
) -> tuple[Prompt, ...]:
    """The rows with what stands after the mark as their answers, if any of them has one.
    Raises DataError: some have none, so that it is not known what to compare with."""
    if not any(published.mark in (prompt.answer or "") for prompt in prompts):
        return prompts
    answers = [published.answer(prompt.answer or "") for prompt in prompts]
    faults = [
        f"{file}, row {prompt.row + 1}: the solution has to end with '{published.mark} 72' or the like, as others do"
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer is None
    ]
    if faults:
        raise DataError(listed(faults))
    listener.phase(f"{file}: the answer of a row is what follows {published.mark!r} in its solution")
    return tuple(replace(prompt, answer=answer) for prompt, answer in zip(prompts, answers, strict=True))


def report(
    config: Config, results: Sequence[FileResult], about: Mapping[str, Any], command: Sequence[str]
) -> dict[str, Any]:
    """Everything but the texts, for evaluation.json. ``config``: with the template in it. ``about``: what else was
    picked, such as recipe and benchmark."""
    sections = ("seed", "model", "data", "reward", "evaluation", "runtime")
    settings = redact({name: value for name, value in config.model_dump(mode="json").items() if name in sections})
    return {
        "model": config.model.path,
        **about,
        "settings": settings,
        "environment": describe_environment(config, command),
        "files": [result.as_json() for result in results],
    }


def average_of(results: Sequence[FileResult]) -> float | None:
    """The unweighted mean of avg@k over the files; None where one of them has none."""
    shares = [result.evaluation.accuracy for result in results]
    return None if not shares or None in shares else sum(s for s in shares if s is not None) / len(shares)


def short_names(files: Sequence[str]) -> list[str]:
    """The files' names without folder and endings; numbered where several have the same."""
    stems = [Path(file).name.partition(".")[0] or Path(file).name for file in files]
    numbers = (f"-{stems[: k + 1].count(stem)}" if stems.count(stem) > 1 else "" for k, stem in enumerate(stems))
    return [*map(operator.add, stems, numbers)]
