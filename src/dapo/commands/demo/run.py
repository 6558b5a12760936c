"""The demos from start to end: a world, a warm-up, reinforcement learning, and what changed; and word problems."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo.commands.demo.task import draw_expressions, make_model, make_tokenizer
from dapo.commands.demo.warmup import OPERATORS, WarmUp, warm_up
from dapo.commands.demo.word_problems import draw_problems, split_pairs
from dapo.config import Config, load_config
from dapo.config.plan import recipe_path
from dapo.errors import ConfigError
from dapo.evaluation.result import Evaluation
from dapo.observe.progress import Listener
from dapo.observe.run_folder import RunFolder
from dapo.records import Group, Prompt
from dapo.util.files import follow_umask, json_line, write_atomic
from dapo.util.shutdown import Shutdown

SIZES = {"heldout": 1000, "exam": 300, "train": 4000, "warmup": 30000}
DATA_FILES = {"data.train": "train.jsonl", "evaluation.data": "heldout.jsonl"}
SHOWN, WHEN = 3, ("before", "after")


def run_demo(
    overrides: Sequence[str], listener: Listener, console: Console | None = None, shutdown: Shutdown | None = None
) -> dict[str, Any]:
    """Make a world, warm a model up in it, train it as the recipe says, and show before and after.

    ``overrides`` are for the recipe; ``seed=7`` is another world, another model and another run.
    Returns the summary, as in ``summary.json``."""
    config = demo_config("cpu-demo", overrides, _world, {"model.path": "model", **DATA_FILES})
    folder = RunFolder.create(config, tell=listener.warning)
    started = time.perf_counter()
    with ExitStack() as lock:  # held all the time, so that who looks at the run sees one that is going on
        lock.enter_context(folder.lock())
        warmed = make_world(config, _world(config), listener)
        seconds_sft = time.perf_counter() - started

        from dapo.orchestrator.experiment import Experiment  # torch is loaded by now
        from dapo.orchestrator.inputs import RunOverrides
        from dapo.orchestrator.launch import run_to_end

        experiment = Experiment(config, listener, RunOverrides(folder=folder, lock=lock))
        summary = run_to_end(experiment, shutdown)
    summary |= {
        "greedy_before": summary["accuracy_before"],
        "greedy_after": summary["accuracy_after"],
        "seconds_sft": round(seconds_sft, 2),
        "sft_steps": warmed.steps,
        "sft_skill": warmed.skill,
    }
    folder.write_summary(summary)
    if console is not None:
        before, after = experiment.evaluator.before, experiment.evaluator.after
        assert before is not None and after is not None  # the demo has held-out rows
        said = f"warm-up {summary['seconds_sft']:.0f} s, reinforcement learning {summary['seconds_rl']:.0f} s; the"
        world = f"made for it (data, tokenizer, warmed-up model): {_world(config)}"
        lines = (f"{said} reward saw the final answer only.", world, _control(config.data.shuffle_answers))
        groups = (before.groups, after.groups)
        print_change(console, summary, "expressions", (("right answers", "greedy"),), groups, _expression, lines)
    return summary


def demo_config(
    recipe_name: str, overrides: Sequence[str], world: Callable[[Config], Path], files: Mapping[str, str]
) -> Config:
    """The recipe with ``overrides``, whose ``files`` by key lie in the ``world`` of its seed."""
    recipe = recipe_path(recipe_name)
    folder = world(load_config(recipe, overrides))
    config = load_config(recipe, [*(f"{key}={folder / file}" for key, file in files.items()), *overrides])
    if not config.evaluation.data:
        raise ConfigError("evaluation.data: the demo compares before and after on held-out rows, so it needs some")
    return config


def _world(config: Config) -> Path:
    """Beside the run folder, named by the seed: it stays where it is when a run is kept under another name."""
    return Path(f"{config.run.dir}-world") / f"seed-{config.seed}"


def make_world(config: Config, folder: Path, listener: Listener) -> WarmUp:
    """Data, tokenizer and a warmed-up model, all from the run's seed, in ``folder``.

    No two of the sets (warm-up, its exam, training, held-out) share an expression."""
    import torch

    from dapo.model.export import export_model
    from dapo.model.loading import load_model
    from dapo.model.placement import set_threads
    from dapo.model.tokenizer import save_tokenizer

    listener.phase("making expressions, a tokenizer and a model")
    folder.mkdir(parents=True, exist_ok=True)  # an earlier one of this seed is made again, the same
    rng = np.random.default_rng(config.seed)
    taken: set[str] = set()
    sets = {name: draw_expressions(rng, size, taken, OPERATORS) for name, size in SIZES.items()}
    for name in ("train", "heldout"):
        write_atomic(
            folder / f"{name}.jsonl", (json_line({"prompt": one.prompt, "answer": one.answer}) for one in sets[name])
        )
    tokenizer = make_tokenizer()
    model = load_model(make_model(config.seed, len(tokenizer)))
    set_threads(config, model)
    torch.manual_seed(config.seed)
    listener.phase(f"warming up a model of {model.num_parameters():,} parameters by imitation")
    warmed = warm_up(model, tokenizer, sets["warmup"], sets["exam"], rng, listener.advance)
    (folder / "model").mkdir(exist_ok=True)
    export_model(model, folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    follow_umask(folder / "model")
    listener.phase(
        f"warmed up: in {warmed.steps} updates it learned to work in steps ({warmed.skill:.0%} right when made to), "
        "and then the habit of not doing so"
    )
    return warmed


def print_change(
    console: Console,
    summary: Mapping[str, Any],
    what: str,
    shares: Sequence[tuple[str, str]],
    groups: tuple[Sequence[Group], Sequence[Group]],
    question: Callable[[Prompt], Text],
    lines: Sequence[str],
) -> None:
    """A table of ``shares`` (what each is called, and its key in the summary) before and after, some responses
    (``groups``: before and after), and where all of it is, after the first of the ``lines``."""
    table = Table(f"on {summary['heldout_rows']:,} held-out {what}", "before RL", "after RL", title="What changed")
    for name, key in shares:
        table.add_row(name, *(f"{summary[f'{key}_{when}']:.1%}" for when in WHEN))
    table.add_row("response length, tokens", *(f"{summary[f'response_length_{when}']:.1f}" for when in WHEN))
    console.print(table)
    if what == "expressions":
        console.print("from left to right, every step modulo 10:", style="dim")
    for several in list(zip(*groups, strict=True))[:SHOWN]:
        console.print(question(several[0].prompt))
        for label, group in zip(WHEN, several, strict=True):
            sample = group.samples[0]
            mark = ("right", "green") if sample.verdict.correct else ("wrong", "red")
            console.print(Text.assemble((f"  {label:>6} ", "dim"), " ".join(sample.text.split()), "  ", mark))
    root = summary["run_dir"]
    program = ".venv/bin/dapo" if "MAKELEVEL" in os.environ else "dapo"  # as whoever called the demo has to type it
    files = f"run folder: {root} (metrics.jsonl, samples/, model-before/, model-after/)"
    told = [lines[0], files, *lines[1:], f"look at it in a browser: {program} ui {root}"]
    console.print("\n".join(told), highlight=False, soft_wrap=True)


def _expression(prompt: Prompt) -> Text:
    return Text.assemble(("prompt ", "dim"), prompt.text, ("  answer ", "dim"), str(prompt.answer))


def _control(shuffled: bool) -> str:
    if shuffled:
        return "this was the control: the rewarded answers were shuffled, so nothing was to be learned from them"
    control = "data.shuffle_answers=true run.dir=runs/cpu-demo-shuffled"
    command = f"make demo ARGS='{control}'" if "MAKELEVEL" in os.environ else f"dapo demo {control}"
    return f"the control, in which the rewarded answers are shuffled: {command}"


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
    before, after = experiment.evaluator.before, experiment.evaluator.after
    assert before is not None and after is not None  # there are held-out rows
    for name, evaluation in zip(WHEN, (before, after), strict=True):
        summary |= {f"{share}_{name}": value for share, value in shares(evaluation).items()}
    experiment.folder.write_summary(summary)
    if console is not None:
        groups = (before.groups, after.groups)
        said = f"{summary['seconds_total']:.0f} s in all. No pair of numbers is in both training and held-out problems."
        lines = (said, f"made for it (data): {_data_folder(config)}")
        print_change(console, summary, "problems", _SHOWN_SHARES, groups, _question, lines)
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
        write_atomic(
            folder / f"{name}.jsonl",
            (
                json_line({"prompt": one.messages, "answer": one.answer, "operation": one.operation})
                for one in draw_problems(rng, pairs, count)
            ),
        )


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
