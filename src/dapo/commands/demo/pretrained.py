"""The demo with a pretrained model: it makes word problems, trains as ``cpu-smollm2.yaml`` says, and shows what
changed, format and reasoning apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo.commands.demo.run import page_command
from dapo.commands.demo.word_problems import WordProblem, draw_problems, split_pairs
from dapo.config import load_config
from dapo.config.recipes import recipe_path
from dapo.errors import ConfigError
from dapo.observe.progress import Listener
from dapo.util.files import json_line, write_atomic
from dapo.util.process import Shutdown

if TYPE_CHECKING:
    from dapo.evaluation.result import Evaluation

TRAIN_ROWS, HELDOUT_ROWS = 2000, 240
SHOWN = 3


def run_word_problems(
    overrides: Sequence[str],
    listener: Listener,
    console: Console | None = None,
    stopping: Shutdown | None = None,
) -> dict[str, Any]:
    """Make the word problems of the run's seed, train on them, and show before and after.

    ``overrides`` are for the recipe; ``seed=7`` is another split of the numbers, other problems and another run.

    Returns:
        The summary, as in ``summary.json``, with the shares of :func:`shares` before and after.
    """
    recipe = recipe_path("cpu-smollm2")
    seed = load_config(recipe, overrides).seed
    data = _data_folder(seed)
    places = [f"data.train={data / 'train.jsonl'}", f"evaluation.data={data / 'heldout.jsonl'}"]
    config = load_config(recipe, [*places, *overrides])
    if not config.evaluation.data:
        raise ConfigError("evaluation.data: the demo compares before and after on held-out rows, so it needs some")
    listener.phase("making word problems")
    make_data(seed, data)

    from dapo.orchestrator.experiment import Experiment
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.orchestrator.launch import run_to_end

    experiment = Experiment(config, listener, RunOverrides())
    summary = run_to_end(experiment, stopping)
    before, after = experiment.evaluator.before, experiment.evaluator.after
    assert before is not None and after is not None  # there are held-out rows
    for name, evaluation in (("before", before), ("after", after)):
        summary |= {f"{share}_{name}": value for share, value in shares(evaluation).items()}
    experiment.folder.write_summary(summary)
    if console is not None:
        show(console, summary, before, after)
    return summary


def _data_folder(seed: int) -> Path:
    return Path("runs/cpu-smollm2-data") / f"seed-{seed}"


def make_data(seed: int, folder: Path) -> None:
    """``train.jsonl`` and ``heldout.jsonl`` in ``folder``: the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs, count in zip(("train", "heldout"), split_pairs(rng), (TRAIN_ROWS, HELDOUT_ROWS), strict=True):
        write_atomic(folder / f"{name}.jsonl", map(_row, draw_problems(rng, pairs, count)))


def _row(problem: WordProblem) -> str:
    return json_line({"prompt": problem.messages, "answer": problem.answer, "operation": problem.operation})


def shares(evaluation: Evaluation) -> dict[str, float]:
    """What the accuracy is made of, as shares of the held-out responses.

    ``answered``: there is an answer in the format that was asked for. ``right_of_answered``: the right ones among
    these. ``reasoned``: the last number is right, wherever and however it stands; no format can earn this.
    """
    verdicts = [sample.verdict for sample in evaluation.samples]
    answered = [v for v in verdicts if v.parts["answer_found"]]
    return {
        "answered": len(answered) / len(verdicts),
        "right_of_answered": sum(bool(v.correct) for v in answered) / max(len(answered), 1),
        "reasoned": sum(v.parts["last_number"] for v in verdicts) / len(verdicts),
    }


def show(console: Console, summary: dict[str, Any], before: Evaluation, after: Evaluation) -> None:
    """The table and some responses, before and after."""
    table = Table(f"on {summary['heldout_rows']:,} held-out problems", "before RL", "after RL", title="What changed")
    for name, key in (
        ("right, in the format asked for (the reward)", "accuracy"),
        ("format: an answer can be read", "answered"),
        ("reasoning: the last number is right, in any format", "reasoned"),
        ("right among those that can be read", "right_of_answered"),
    ):
        table.add_row(name, f"{summary[f'{key}_before']:.1%}", f"{summary[f'{key}_after']:.1%}")
    lengths = (f"{summary[f'response_length_{when}']:.1f}" for when in ("before", "after"))
    table.add_row("response length, tokens", *lengths)
    console.print(table)
    for was, now in list(zip(before.groups, after.groups, strict=True))[:SHOWN]:
        question = was.prompt.text.strip().splitlines()[-1].removeprefix("user: ")  # the examples come before it
        console.print(Text.assemble((f"{question}  ", "dim"), str(was.prompt.answer)))
        for label, group in (("before", was), ("after", now)):
            sample = group.samples[0]
            mark = ("right", "green") if sample.verdict.correct else ("wrong", "red")
            console.print(Text.assemble((f"  {label:>6} ", "dim"), " ".join(sample.text.split()), "  ", mark))
    root = summary["run_dir"]
    console.print(
        f"{summary['seconds_total']:.0f} s in all. No pair of numbers is in both training and held-out problems.\n"
        f"run folder: {root} (metrics.jsonl, samples/, model-before/, model-after/)\n"
        f"look at it in a browser: {page_command(root)}",
        highlight=False,
        soft_wrap=True,
    )
