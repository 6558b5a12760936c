"""All checks in their order, and the two ways to run them: on a recipe, and the quick ones before a training.

Consumes a recipe. Produces findings, one by one. Waits for each check no longer than its deadline; one that takes
longer is left behind in its thread (a daemon) and told of."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.checks.context import Area, CheckContext, Finding, NotAtHand, area_of
from dapo.config.plan import demo_of, existing_recipe, remedy
from dapo.errors import ConfigError, UserError

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.reward.contract import Scorer

Check = Callable[[CheckContext], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A check: its name for those who wait, what it is about, and how long it may take, in seconds. ``at_start``: it is
    made before each training, too."""

    name: str
    area: Area
    check: Check
    seconds: float = 30.0
    at_start: bool = False


def entries() -> list[Entry]:
    """All checks, what others need first. Loads torch."""
    from dapo.checks import cluster, memory, model, rewards, rows, sampling, settings

    return [
        Entry("settings", "recipe", settings.check_settings),
        Entry("files", "data", settings.check_files),
        Entry("run-folder", "machine", settings.check_run_folder),
        Entry("device", "machine", model.check_device),
        Entry("cluster", "machine", cluster.check_cluster, 60.0),
        Entry("ahead", "recipe", settings.check_ahead),
        Entry("tokenizer", "model", model.check_tokenizer),
        Entry("architecture", "model", model.check_architecture, 60.0),
        Entry("engine", "model", model.check_engine, 60.0),
        Entry("tokens", "model", model.check_tokens, at_start=True),
        Entry("rows", "data", rows.check_rows, 120.0),
        Entry("prompt", "data", rows.check_sample, at_start=True),
        Entry("overlap", "data", rows.check_overlap, at_start=True),
        Entry("chat", "model", model.check_chat, at_start=True),
        Entry("tools", "model", model.check_tools, at_start=True),
        Entry("bos", "model", model.check_bos, at_start=True),
        Entry("context", "model", model.check_context),
        Entry("server", "machine", model.check_server),
        Entry("disk", "machine", settings.check_disk, at_start=True),
        Entry("memory", "machine", memory.check_memory, at_start=True),
        Entry("snapshot", "machine", settings.check_snapshot, at_start=True),
        Entry("sandbox", "reward", rewards.check_sandbox),
        Entry("reward", "reward", rewards.check_reward, rewards.SECONDS + 15.0),
        Entry("weights", "model", model.check_weights, 300.0),
        Entry("agreement", "model", sampling.check_agreement, 120.0),
        Entry("probe", "data", sampling.check_probe, sampling.PROBE_SECONDS + 30.0),
    ]


def examine(
    recipe: Path,
    overrides: Sequence[str] = (),
    probe: int = 0,
    tell: Callable[[str], None] = lambda name: None,
    of_stage: str | None = None,
    checks: Sequence[Entry] | None = None,
) -> Iterator[Finding]:
    """Look at a recipe and all that it names. Nothing is written, nothing is downloaded.

    ``probe``: how many prompts to sample from and score. ``tell`` hears the name of each check before it begins.
    ``of_stage``: it is the recipe of a stage, which has its own ``checks``."""
    from dapo.config import load_config
    from dapo.config.stages import load_stage

    recipe = existing_recipe(recipe)
    try:
        config: Any = load_stage(of_stage, recipe, overrides) if of_stage else load_config(recipe, overrides)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield Finding("recipe", "recipe", "fail", line)
        return
    yield Finding("recipe", "recipe", "pass", f"{recipe} can be read, and its keys go together")
    tell("loading the libraries")
    context = CheckContext(config, demo=demo_of(recipe), remedy=remedy(recipe), probe=probe)
    yield from run_checks(context, entries() if checks is None else checks, tell)


def run_checks(
    context: CheckContext, checks: Sequence[Entry], tell: Callable[[str], None] = lambda name: None
) -> Iterator[Finding]:
    """The findings of each check. What a check could not look at, because something that it needs is missing, is told
    of in one line for each thing, and not as a mistake: that the thing is missing has been told."""
    waiting: dict[str, list[str]] = {}
    for entry in checks:
        tell(entry.name)
        findings, missing = run_check(context, entry)
        yield from findings
        if missing is not None:
            waiting.setdefault(missing, []).append(entry.name)
    for thing, names in waiting.items():
        lacks = "are missing" if thing.endswith("s") else "is missing"
        yield Finding("recipe", "not-checked", "skip", f"{', '.join(names)}: the {thing} {lacks}")


def run_check(context: CheckContext, entry: Entry) -> tuple[list[Finding], str | None]:
    """Findings of one check, and the thing that it needed and that is not there (or None).

    Whatever it raises becomes a finding: no check hides the others."""
    findings: list[Finding] = []
    missing: list[str] = []

    def work() -> None:
        try:
            for finding in entry.check(context):
                findings.append(finding)
        except NotAtHand as absent:
            missing.append(str(absent))
        except UserError as error:
            findings.append(Finding(area_of(error, entry.area), entry.name, "fail", str(error)))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"the check itself failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            findings.append(Finding(entry.area, entry.name, "fail", text, "report it: this is a fault of dapo's"))

    thread = threading.Thread(target=work, name=f"dapo-doctor-{entry.name}", daemon=True)
    thread.start()
    thread.join(entry.seconds)
    found = list(findings)  # the thread may still be at work
    if thread.is_alive():
        text = f"not done after {entry.seconds:g} s, so it was left"
        return [*found, Finding(entry.area, entry.name, "fail", text, "look at what it waits for")], None
    return found, missing[0] if missing else None


async def brief(config: Config, *, model: Any, scorer: Scorer | None, **loaded: Any) -> list[Finding]:
    """The checks at the start of a training, which has loaded everything already: what takes no second, and nothing
    that loading has said already. Raises nothing: what it finds is for the user to judge.

    ``scorer`` is started; None: a function from Python scores, which is left out, as what it costs is not known.
    ``loaded``: ``tokenizer``, ``template``, ``source``, ``heldout`` and ``device``, as in :class:`CheckContext`."""
    from dapo.checks.answers import spread
    from dapo.checks.rewards import verify_within

    own = {"model": model, "shape": model, "model_config": model.config, "own_reward": scorer is None}
    context = CheckContext(config, files=True, at_start=True, **own, **loaded)
    checks = [replace(entry, seconds=5.0) for entry in entries() if entry.at_start]
    found = await asyncio.to_thread(lambda: list(run_checks(context, checks)))
    if scorer is not None and config.reward.kind in ("math", "exact", "code", "function"):
        count = 2 if config.reward.kind == "function" else 16  # what a function of the user's costs is not known
        found += await verify_within(config, scorer, spread(loaded["source"].prompts, count), seconds=20.0)
    return found
