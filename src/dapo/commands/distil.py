"""``dapo distil``."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dapo.commands.rank import RankerName, Reference
from dapo.commands.shared import options
from dapo.commands.train import stopped_by_signals
from dapo.errors import ConfigError
from dapo.util.terminal import Terminal


def distil(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="Model that samples and learns.")],
    ranker: RankerName,
    data: Annotated[list[str], typer.Option(metavar="FILE", help="Rows to sample on; may be given again.")],
    heldout: Annotated[list[str], typer.Option(metavar="FILE", help="Other prompts, on which the gain is measured.")],
    overrides: options.Overrides = None,
    method: Annotated[
        str, typer.Option(metavar="sft|dpo", help="Imitate the best, or prefer it to the worst.")
    ] = "sft",
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Imitate all that pass this filter in place of the best.")
    ] = None,
    reference: Reference = None,
    gold: Annotated[
        str | None, typer.Option(metavar="REWARD", help="Kind or recipe of a reward that tells what is right.")
    ] = None,
    samples: Annotated[int, typer.Option(min=2, metavar="N", help="Samples of each prompt.")] = 8,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    folder: Annotated[Path, typer.Option("--dir", help="Folder for all of it.")] = Path("runs/distil"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on: what is in the folder is not made again.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Teach POLICY what RANKER chooses from its samples, and say how much of the gain of best-of-n it keeps.

    SECTION.KEY=VALUE are keys of the stage (dapo sft, dapo dpo), such as training.steps=50.
    """
    if method not in ("sft", "dpo") or (method == "dpo" and calibration is not None):
        raise ConfigError(f"--method {method}: must be sft or dpo; with --calibration sft")
    from dapo.distil import Plan, distil
    from dapo.inference.model import settings_for
    from dapo.observe.progress import make_listener
    from dapo.ranking.calibrate import read_thresholds
    from dapo.ranking.score import load_ranker

    sampling = options.given_options(locals(), *(name for name in options.SAMPLING if name != "min_p"))
    _, config = settings_for(policy, sampling, {"evaluation": {"data": data, "rows": None}})
    judge = partial(load_ranker, ranker, reference=reference)
    judge()  # so that what is wrong with its name shows at once
    thresholds = None if calibration is None else read_thresholds(calibration, ranker)
    plan = Plan(config, ranker, data, heldout, folder, method, thresholds, overrides or ())
    with (
        closing(make_listener(quiet, Terminal(stderr=True))) as listener,
        stopped_by_signals(again="the same command with --resume") as shutdown,
    ):
        distil(plan, judge, partial(load_ranker, gold) if gold else None, listener, shutdown, resume)
    print((folder / "report.md").read_text(), end="")
