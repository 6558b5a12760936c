"""``dapo replay``: a rollout step made again, and what comes out otherwise than it was recorded.

Consumes a run folder, of which nothing is changed. Produces a :class:`Replay`. Every part stands by itself: where one
cannot be made again, the result says why, and the others are there all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dapo.commands.replay import recompute
from dapo.commands.replay.stored import StoredStep, differing_texts, read_step
from dapo.commands.replay.weights import Rerun, device_here, find_start, flat_report, other_threads
from dapo.commands.reward.rescore import StepChange, StoredRows, rescore
from dapo.config import Config, load_config
from dapo.data.template import PromptTemplate
from dapo.errors import ConfigError, UserError
from dapo.model.loading import load_tokenizer, read_config, stop_token_ids, with_generation_config
from dapo.model.placement import determinism
from dapo.observe.changes import config_of_step
from dapo.observe.run_view import RunView
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.records import Group, Sample
from dapo.training.update_report import UpdateReport
from dapo.util.asynchronous import run_async

_TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 3e-2}
"""Relative difference of loss and gradient norm that other hardware or another order of additions may make."""


@dataclass(slots=True)
class Replay:
    """What came out.

    ``tolerance``: relative, for what the weights were needed for; 0: compared to the bit. ``start``: the kept weights,
    and ``rerun`` the steps whose updates were made again from there. ``samples``: of those trained on, from reward to
    advantage. ``updates``: planned, and where they could be made again with their numbers. ``tokens``: of the sample
    asked for. ``missing``: what could not be made again, and why. ``notes``: what else to know."""

    run: str
    step: int
    batch: dict[str, Any]
    samples: list[dict[str, Any]]
    updates: list[dict[str, Any]]
    tolerance: float = 0.0
    start: str | None = None
    rerun: list[int] = field(default_factory=list)
    rewards: dict[str, Any] | None = None
    sample: dict[str, Any] | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    differences: list[recompute.Difference] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return found | {"differences": [difference.as_json() for difference in self.differences]}


def replay(
    root: Path,
    step: int,
    sample: tuple[int, int] | None = None,
    rewards: bool = True,
    phase: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Make a rollout step again.
    ``step``: from 1, as in ``samples/``. ``sample``: draw and index of the one whose tokens are wanted. ``rewards``:
    score the samples again, which may cost calls of a judge.
    Raises UserError: there is no such run, step or sample (says which there are), or a stored file is damaged.
    """
    view = RunView.read(root)
    of_step = partial(config_of_step, load_config(view.folder.config), view.changes)
    config = of_step(step)
    if config.algorithm.kind == "ppo":
        raise ConfigError(
            f"{root}: a step of algorithm.kind=ppo cannot be made again, as the values of its critic are not kept; "
            "dapo inspect shows its samples, with the mean advantage of each"
        )
    _require_step(view, step)
    stored = read_step(view.folder, step)
    wanted = _wanted(stored, sample)
    in_memory = view.algorithm_from_python
    again = stored.trained if in_memory else BatchBuilder(config).shape(stored.trained)
    found = Replay(
        run=str(root),
        step=step,
        batch=_batch(stored),
        samples=[recompute.sample_as_json(g.draw, s, config) for g in stored.trained for s in g.samples],
        updates=recompute.planned_updates(stored.trained, config),
    )
    changed = view.changes_of_algorithm(config)
    found.notes += [f"the algorithm is not the one that the run started with: {one}" for one in changed]
    found.differences += recompute.faults(stored.faults)
    decode = _check_texts(found, view, stored, config)
    found.differences += recompute.compare_decisions(stored, config)
    _check_versions(found, view, stored, config)
    if config.algorithm.kl.mode != "reward":
        found.differences += recompute.compare_groups(stored.trained, again)
    if rewards:
        _rescore(found, view, config, phase)
    else:
        found.missing.append("rewards: not asked for")
    trace = _Trace(wanted, decode, of_step)
    _make_updates(found, view, config, stored, trace, phase)
    if wanted is not None:
        found.sample = trace.as_json()
    return found


# --- what was asked for -------------------------------------------------------------------------------------------


def _require_step(view: RunView, step: int) -> None:
    there = view.steps_with_samples
    if (share := view.share_of_samples) not in (0, 1):
        text = f"its recipe says run.save_samples={share:g}: a step is replayed from all of its groups"
        raise UserError(f"{view.folder.root}: {text}")
    if not there:
        why = "none yet" if view.saves_samples else "its recipe says run.save_samples=false"
        raise UserError(f"{view.folder.root}: no samples were saved, which a replay is made from: {why}")
    if step not in there:
        raise ConfigError(f"--step {step}: no samples of this step; there are those of step {_some(there)}")


def _wanted(stored: StoredStep, sample: tuple[int, int] | None) -> tuple[Group, str, Sample] | None:
    if sample is None:
        return None
    draw, index = sample
    option = f"--sample {draw}:{index}"
    groups = {group.draw: (group, status) for group, status in stored.groups}
    if draw not in groups:
        raise ConfigError(f"{option}: step {stored.step} has no draw {draw}; there are {_some(sorted(groups))}")
    group, status = groups[draw]
    samples = {one.index: one for one in group.samples}
    if index not in samples:
        raise ConfigError(f"{option}: draw {draw} has no sample {index}; there are {_some(list(samples))}")
    return group, status, samples[index]


def _some(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:11], "...", shown[-1]])


# --- without weights ----------------------------------------------------------------------------------------------


def _batch(stored: StoredStep) -> dict[str, Any]:
    everything = [group for group, _ in stored.groups]
    trained = [sample for group in stored.trained for sample in group.samples]
    return {
        "groups": len(everything),
        "samples": sum(len(group.samples) for group in everything),
        "groups_trained": len(stored.trained),
        "samples_trained": len(trained),
        "tokens_trained": sum(sample.length for sample in trained),
        "loss_tokens": sum(int(part.loss_mask.sum()) for s in trained if s.in_loss for part in s.parts),
        "dropped": dict(Counter(status for _, status in stored.groups if status != "kept")),
    }


def _check_texts(found: Replay, view: RunView, stored: StoredStep, config: Config) -> Callable[[int], str]:
    folder = view.folder.model_before
    try:
        tokenizer = load_tokenizer(str(folder), config.model.trust_remote_code)
        template = PromptTemplate(config.data, tokenizer)
        if (folder / "config.json").is_file():  # not of an adapter
            owner = SimpleNamespace(config=read_config(str(folder), config.model.trust_remote_code))
            owner = with_generation_config(owner, str(folder))
            template.ends_with(stop_token_ids(owner, tokenizer, config.rollout.stop_token_ids))
    except UserError as error:
        found.missing.append(f"texts of tokens: {folder} holds no tokenizer that can be loaded: {error}")
        return lambda token: ""
    found.differences += recompute.faults(differing_texts(stored, template.decode))
    return lambda token: template.text([token])


def _check_versions(found: Replay, view: RunView, stored: StoredStep, config: Config) -> None:
    """Compare the versions that tokens were sampled under with that which the run had after the step before."""
    after = {entry["step"]: entry.get("version") for entry in view.metrics}
    version = 0 if found.step == 1 else after.get(found.step - 1)
    if isinstance(version, int):
        found.differences += recompute.compare_versions(stored, version, config.rollout.max_staleness)
    else:
        found.missing.append(f"versions of tokens: metrics.jsonl does not say which one step {found.step - 1} led to")


def _rescore(found: Replay, view: RunView, config: Config, phase: Callable[[str], None]) -> None:
    function = view.reward_from_python
    if function is not None:
        found.missing.append(f"rewards: trained on a Python function ({function}), which the folder does not hold")
        return
    phase("scoring the samples again")
    changes: list[StepChange] = []
    try:
        changed = view.changes_of_reward(config)
        found.notes += [f"the reward is not the one that the run started with: {one}" for one in changed]
        rows = StoredRows(config, config.reward, found.notes.append)
        run_async(lambda: rescore(view.folder, [found.step], config.reward, config, rows, changes.append))
    except UserError as error:
        found.missing.append(f"rewards: {error}")
        return
    (change,) = changes
    found.rewards = {"samples": change.numbers["samples"], "changed": len(change.changes)}
    told = [one.as_json() for one in change.changes]
    found.differences += [recompute.Difference("reward", t["before"], t["after"], t["draw"], t["index"]) for t in told]


# --- with weights -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Trace:
    wanted: tuple[Group, str, Sample] | None
    decode: Callable[[int], str]
    of_step: Callable[[int], Config]
    rerun: Rerun | None = None
    traced: list[dict[str, Any]] | None = None
    traced_in: int | None = None

    def visit(self, number: int, update: recompute.Update, objective: Any) -> None:
        assert self.rerun is not None
        policy = self.rerun.trainer.policy
        if self.wanted is not None and self.traced is None:
            group, _, sample = self.wanted
            places = np.flatnonzero((update.batch.draws == group.draw) & (update.batch.indices == sample.index))
            if len(places):
                self.traced = recompute.traced_tokens(policy, update, objective, int(places[0]))
                self.traced_in = number

    def as_json(self) -> dict[str, Any]:
        assert self.wanted is not None
        group, status, sample = self.wanted
        known = recompute.stored_tokens(sample, self.decode)
        traced = self.traced if self.traced is not None else [{}] * len(known)
        return {
            "draw": group.draw,
            "index": sample.index,
            "row": group.prompt.row,
            "status": status,
            "prompt": group.prompt.text,
            "update": self.traced_in,
            "tokens": [{**one, **other} for one, other in zip(known, traced, strict=True)],
        }


def _make_updates(
    found: Replay, view: RunView, config: Config, stored: StoredStep, trace: _Trace, phase: Callable[[str], None]
) -> None:
    def give_up(reason: str) -> None:
        found.missing.append(f"losses and gradients: {reason}")
        if config.algorithm.kl.mode == "reward":
            found.missing.append("shaped rewards and advantages: the KL in them needs the weights, see above")

    if not stored.trained:
        return give_up("there was nothing to train on")
    if in_memory := view.algorithm_from_python:
        return give_up(f"trained with {' and '.join(in_memory)} from Python, which the folder does not hold")
    start = find_start(view.folder, config, found.step, 0)
    if isinstance(start, str):  # those after a checkpoint from inside of the step, if any
        inside = find_start(view.folder, config, found.step, len(found.updates) - 1)
        start = inside if not isinstance(inside, str) and inside.place.steps == found.step - 1 else start
    if isinstance(start, str):
        return give_up(start)
    found.start = str(start.folder.relative_to(view.folder.root))
    found.rerun = list(range(start.place.steps + 1, found.step))
    device, reasons = device_here(view, config)
    try:
        with determinism(config, device):
            phase(f"loading {found.start}")
            rerun = trace.rerun = Rerun(view.folder, trace.of_step, start, found.step, device)
            reasons += other_threads(view, config)
            if reasons:
                found.tolerance = rerun.tolerance = _TOLERANCE[config.model.compute_dtype]
                found.notes.append(f"losses and gradients are compared to {found.tolerance:g}: {'; '.join(reasons)}")
            rerun.go_to(found.step, phase)
            if rerun.differences:
                found.differences += rerun.differences
                return give_up("an update on the way there does not come out as it was recorded, so the weights differ")
            phase(f"making the updates of step {found.step} again")
            reports = rerun.make(stored, trace.visit)
    except UserError as error:
        return give_up(str(error))
    found.differences += rerun.differences
    _report_updates(found, stored, reports)
    if config.algorithm.kl.mode == "reward" and rerun.shaped is not None:
        found.differences += recompute.compare_groups(stored.trained, rerun.shaped)


def _report_updates(found: Replay, stored: StoredStep, reports: Mapping[int, UpdateReport]) -> None:
    for planned in found.updates:
        number = planned["update"]
        if number not in reports:
            found.missing.append(f"update {number}: the oldest weights of this step, in {found.start}, are later")
            continue
        recorded = stored.reports[number] if number < len(stored.reports) else None
        planned["recomputed"] = flat_report(asdict(reports[number]))
        planned["recorded"] = None if recorded is None else flat_report(recorded)
