"""The demo with a pretrained model: it makes word problems, trains as ``cpu-smollm2.yaml`` says, and shows what
changed, format and reasoning apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from dapo.commands.demo.run import DATA_FILES, WHEN, demo_config, files_of, response_lengths, show_change
from dapo.commands.demo.word_problems import WordProblem, draw_problems, split_pairs
from dapo.config import Config
from dapo.observe.progress import Listener
from dapo.records import Prompt
from dapo.util.files import json_line, write_atomic
from dapo.util.process import Shutdown

if TYPE_CHECKING:
    from dapo.evaluation.result import Evaluation

TRAIN_ROWS, HELDOUT_ROWS = 2000, 240
_SHOWN_SHARES = (
    ("right, in the format asked for (the reward)", "accuracy"),
    ("format: an answer can be read", "answered"),
    ("reasoning: the last number is right, in any format", "reasoned"),
    ("right among those that can be read", "right_of_answered"),
)


def run_word_problems(
    overrides: Sequence[str], listener: Listener, console: Console | None = None, shutdown: Shutdown | None = None
) -> dict[str, Any]:
    """Make the word problems of the run's seed, train on them, and show before and after.

    ``overrides`` are for the recipe; ``seed=7`` is another split of the numbers, other problems and another run.
    Returns the summary, as in ``summary.json``, with the shares of :func:`shares` before and after."""
    config = demo_config("cpu-smollm2", overrides, _data_folder, DATA_FILES)
    listener.phase("making word problems")
    make_data(config.seed, _data_folder(config))

    from dapo.orchestrator.experiment import Experiment
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.orchestrator.launch import run_to_end

    experiment = Experiment(config, listener, RunOverrides())
    summary = run_to_end(experiment, shutdown)
    assert experiment.before is not None and experiment.after is not None  # there are held-out rows
    for name, evaluation in zip(WHEN, (experiment.before, experiment.after), strict=True):
        summary |= {f"{share}_{name}": value for share, value in shares(evaluation).items()}
    experiment.folder.write_summary(summary)
    if console is not None:
        rows = [(name, *(f"{summary[f'{key}_{when}']:.1%}" for when in WHEN)) for name, key in _SHOWN_SHARES]
        show_change(
            console,
            f"on {summary['heldout_rows']:,} held-out problems",
            [*rows, response_lengths(summary)],
            [],
            (experiment.before.groups, experiment.after.groups),
            _question,
            f"{summary['seconds_total']:.0f} s in all. No pair of numbers is in both training and held-out problems.\n"
            f"{files_of(summary)}",
            summary["run_dir"],
        )
    return summary


def _question(prompt: Prompt) -> Text:
    text = prompt.text.strip().splitlines()[-1].removeprefix("user: ")  # the examples come before it
    return Text.assemble((f"{text}  ", "dim"), str(prompt.answer))


def _data_folder(config: Config) -> Path:
    return Path("runs/cpu-smollm2-data") / f"seed-{config.seed}"


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
    these. ``reasoned``: the last number is right, wherever and however it stands; no format can earn this."""
    verdicts = [sample.verdict for sample in evaluation.samples]
    answered = [v for v in verdicts if v.parts["answer_found"]]
    return {
        "answered": len(answered) / len(verdicts),
        "right_of_answered": sum(bool(v.correct) for v in answered) / max(len(answered), 1),
        "reasoned": sum(v.parts["last_number"] for v in verdicts) / len(verdicts),
    }
