"""The demo from start to end: a world, a warm-up, reinforcement learning, and what changed."""

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
from dapo.config import Config, load_config
from dapo.config.plan import recipe_path
from dapo.errors import ConfigError
from dapo.observe.progress import Listener
from dapo.observe.run_folder import RunFolder
from dapo.records import Group
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
    summary |= {"seconds_sft": round(seconds_sft, 2), "sft_steps": warmed.steps, "sft_skill": warmed.skill}
    folder.write_summary(summary)
    if console is not None:
        before, after = experiment.evaluator.before, experiment.evaluator.after
        assert before is not None and after is not None  # the demo has held-out rows
        print_change(console, summary, (before.groups, after.groups), config)
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
    console: Console, summary: Mapping[str, Any], groups: tuple[Sequence[Group], Sequence[Group]], config: Config
) -> None:
    """A table of before and after, some responses (``groups``: before and after), and where all of it is."""
    table = Table(f"on {summary['heldout_rows']:,} held-out expressions", "before RL", "after RL", title="What changed")
    table.add_row("right answers, greedy", *(f"{summary[f'accuracy_{when}']:.1%}" for when in WHEN))
    table.add_row("response length, tokens", *(f"{summary[f'response_length_{when}']:.1f}" for when in WHEN))
    console.print(table)
    console.print("from left to right, every step modulo 10:", style="dim")
    for several in list(zip(*groups, strict=True))[:SHOWN]:
        prompt = several[0].prompt
        answer = ("  answer ", "dim"), str(prompt.answer)
        console.print(Text.assemble(("prompt ", "dim"), prompt.text, *answer))
        for label, group in zip(WHEN, several, strict=True):
            sample = group.samples[0]
            mark = ("right", "green") if sample.verdict.correct else ("wrong", "red")
            console.print(Text.assemble((f"  {label:>6} ", "dim"), " ".join(sample.text.split()), "  ", mark))
    root = summary["run_dir"]
    program = ".venv/bin/dapo" if "MAKELEVEL" in os.environ else "dapo"  # as whoever called the demo has to type it
    control = "this was the control: the rewarded answers were shuffled, so nothing was to be learned from them"
    if not config.data.shuffle_answers:
        command = f"{program} demo data.shuffle_answers=true run.dir=runs/cpu-demo-shuffled"
        control = f"the control, in which the rewarded answers are shuffled: {command}"
    told = [
        f"warm-up {summary['seconds_sft']:.0f} s, reinforcement learning {summary['seconds_rl']:.0f} s; the reward saw "
        "the final answer only.",
        f"run folder: {root} (metrics.jsonl, samples/, model-before/, model-after/)",
        f"made for it (data, tokenizer, warmed-up model): {_world(config)}",
        control,
        f"look at it in a browser: {program} ui {root}",
    ]
    console.print("\n".join(told), highlight=False, soft_wrap=True)
