"""The weights that an update started from: kept, or made again by re-running the stored updates since an older place.

Sampling is not repeated: every step that is re-run trains on its stored batch. So what has to be the same is the
trainer alone, which in deterministic mode on the same machine it is, to the bit."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dapo.commands.replay.recompute import Difference, Update, faults, reports_differ
from dapo.commands.replay.stored import StoredStep, read_step
from dapo.config import Config
from dapo.errors import ConfigError, UserError
from dapo.model.placement import device_of, set_threads
from dapo.observe.checkpoints import CheckpointId, Checkpoints, damages
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import RunView
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.orchestrator.encoded_state import read_state
from dapo.records import Group, TokenBatch
from dapo.rollout.native.exact import exact_attention
from dapo.training.learner import LocalLearner
from dapo.training.lora import load_trainable
from dapo.training.packing import advantage_column, pack
from dapo.training.trainer import Trainer
from dapo.training.update_report import UpdateReport
from dapo.util.files import holds_model

Visit = Callable[[int, Update, Any], None]  # called before an update is made, with its number in the step


@dataclass(frozen=True, slots=True)
class Start:
    """Weights that are kept. ``folder``: model-before, or a checkpoint. ``place``: where in the run."""

    folder: Path
    place: CheckpointId

    @property
    def is_beginning(self) -> bool:
        """Before the first update: there is neither an optimizer nor any other state yet."""
        return not self.place.steps and not self.place.updates


def find_start(folder: RunFolder, config: Config, step: int, update: int) -> Start | str:
    """The furthest kept weights from which an update can be reached; if there are none, why.
    ``step`` counts from 1, ``update`` from 0."""
    starts = list(_starts(folder))
    before = [s for s in starts if (s.place.steps, s.place.updates) <= (step - 1, update)]
    if not before:
        return (
            f"the weights before step {step} are not kept and cannot be made again: model-before/ is not there, and "
            f"{'all checkpoints are later ones' if starts else 'there are no checkpoints'}"
        )
    start = max(before, key=lambda s: (s.place.steps, s.place.updates))
    name = start.folder.relative_to(folder.root)
    if start.place.steps < step - 1 and not config.runtime.deterministic:
        return (
            f"the weights before step {step} are not kept; the nearest ones are in {name}, and without "
            "runtime.deterministic updates made again from there lead elsewhere (run.save_every and run.keep_last keep "
            "more)"
        )
    return start


def _starts(folder: RunFolder) -> Iterator[Start]:
    if holds_model(folder.model_before):
        yield Start(folder.model_before, CheckpointId(0))
    for place in Checkpoints(folder.checkpoints).places():
        yield Start(folder.checkpoints / place.name, place)


class Rerun:
    """A trainer at a place of the run, and the way from there.
    ``tolerance``: relative, that updates are compared with; 0: to the bit. ``differences``: what on the way did not
    come out as it was recorded. ``shaped``: the groups of the step made last, with shaped rewards and advantages made
    again, a KL in the reward included; None: its batch was taken from a checkpoint."""

    def __init__(
        self, folder: RunFolder, of_step: Callable[[int], Config], start: Start, step: int, device: torch.device
    ) -> None:
        """Load the weights. ``of_step``: the settings of each step. ``step``: the last one that is to be made.
        Raises UserError: they, or the state beside them, cannot be read."""
        self._folder, self._of_step, self.tolerance = folder, of_step, 0.0
        configs = [of_step(k) for k in range(start.place.steps + 1, step + 1)]
        config = next((c for c in configs if c.algorithm.kl.mode != "off"), configs[0])  # one that needs the reference
        self.differences: list[Difference] = []
        self.shaped: Sequence[Group] | None = None
        problems = None if start.folder == folder.model_before else damages(start.folder)
        if problems:
            raise UserError(f"{start.folder} is damaged: {'; '.join(problems)}")
        state = {} if start.is_beginning else read_state(start.folder, ("steps_done", "step", "prepare"))
        before = folder.model_before
        has_before = holds_model(before)
        if config.algorithm.kl.mode != "off" and not has_before:
            raise UserError(f"{before}: is not there, and the reference policy of the KL is what it was")
        source = before if has_before else start.folder / "model"
        model = load_trainable(source, config.model, device)
        set_threads(config, model)
        attention, dtype = exact_attention(config), getattr(torch, config.model.compute_dtype)
        self.trainer = Trainer(model, config.training, config.rollout.temperature, dtype, attention=attention)
        self.preparer = BatchBuilder(config)
        self.learner = LocalLearner(self.trainer, config, self.preparer.kl)
        self._step = start.place.steps  # steps done
        self._under_way: dict[str, Any] | None = None
        if not start.is_beginning or start.folder != before:
            self.trainer.load(start.folder / "model")
        if state:
            self.trainer.load_state(start.folder / "optimizer")
            self._use(of_step(start.place.begun))
            self.preparer.kl.load_state(state["prepare"])
            self._under_way = state["step"] if start.place.updates else None

    def go_to(self, step: int, phase: Callable[[str], None]) -> None:
        """Re-run the updates of all steps before ``step``, up to the first that does not come out as recorded."""
        while self._step < step - 1 and not self.differences:  # after one, all others would differ too
            phase(f"making the updates of step {self._step + 1} again")
            stored = read_step(self._folder, self._step + 1)
            self.differences += faults(stored.faults, f"step {stored.step}: ")
            self.make(stored)

    def make(self, stored: StoredStep, visit: Visit | None = None) -> dict[int, UpdateReport]:
        """Make the updates of the next step and compare them with what was recorded. ``visit``: sees every update
        before it is made.
        Returns the report of every update, by its number. Those made before the checkpoint was taken are not among
        them."""
        config = self._of_step(stored.step)
        self._use(config)
        self.trainer.begin_step(stored.step - 1)
        if config.training.final_learning_rate is not None:
            # a rate that falls follows clock and length of the run, so as recorded
            self.trainer.set_learning_rate(stored.reports[0]["learning_rate"])
        reports: dict[int, UpdateReport] = {}
        earlier: list[UpdateReport] = []
        if self._under_way is not None:
            batch, earlier, self._under_way = self._under_way["batch"], self._under_way["reports"], None
            self.shaped = None
        else:
            batch = self._batch(stored)
        objective, watched = self.learner.objective, self.learner.watched_objective
        for number, mini in self.preparer.minibatches(batch, start=len(earlier)):
            update = Update(mini, self.learner.inputs(mini))
            if visit is not None:
                visit(number, update, objective)
            reports[number] = self.trainer.update(mini, update.inputs, watched)
            self._compare(stored, number, reports[number])
        self.preparer.observe([*earlier, *reports.values()], batch)
        self.trainer.publish()
        self._step = stored.step
        return reports

    def _use(self, config: Config) -> None:
        self.learner.use(config)
        self.preparer.use(config)

    def _batch(self, stored: StoredStep) -> TokenBatch:
        """The batch with the advantages that were recorded, which are those that the run trained on."""
        self._require_vocabulary(stored)
        try:
            annotated = self.learner.annotated(self.preparer.build(stored.trained))
            self.shaped, batch = self.preparer.finish(stored.trained, annotated)
            recorded = advantage_column(stored.trained)
        except ValueError as error:
            raise UserError(f"step {stored.step}: its stored samples do not make a batch: {error}") from None
        return replace(batch, mask=pack(stored.trained).mask).with_columns(advantages=recorded)

    def _require_vocabulary(self, stored: StoredStep) -> None:
        """Raises UserError: a token that the model does not have, which a GPU would fail on without a word of it."""
        size = self.trainer.policy.model.get_input_embeddings().num_embeddings
        for group in stored.trained:
            for sample in group.samples:
                ids = [*group.prompt.token_ids, *sample.token_ids.tolist()]
                odd = next((token for token in ids if not 0 <= token < size), None)
                if odd is not None:
                    which = f"step {stored.step}: sample {group.draw}:{sample.index}"
                    raise UserError(f"{which} has a token {odd}, but the model knows {size}")

    def _compare(self, stored: StoredStep, number: int, report: UpdateReport) -> None:
        if number >= len(stored.reports):
            return
        for difference in reports_differ(
            flat_report(stored.reports[number]), flat_report(asdict(report)), self.tolerance, number
        ):
            self.differences.append(replace(difference, what=f"step {stored.step}: {difference.what}"))


_COMPARED = ("loss", "grad_norm", "learning_rate", "tokens", "response_tokens", "loss_tokens")


def flat_report(report: dict[str, Any]) -> dict[str, Any]:
    """Numbers of an update's report by name: statistics as means over tokens, no times, nothing of the machine's."""
    found = {name: report[name] for name in _COMPARED if name in report}
    found["skipped"] = bool(report.get("skipped"))  # the words name a folder that a replay does not write
    for name, (total, count) in (report.get("statistics") or {}).items():
        found[name] = total / count if count and total is not None else None
    mismatch = report.get("mismatch") or {}
    if mismatch.get("tokens"):
        found["mismatch"] = mismatch["absolute_sum"]
    return found


# --- the machine of the run and the one here: why numbers may not come out to the bit ------------------------------


def device_here(view: RunView, config: Config) -> tuple[torch.device, list[str]]:
    """Where to compute, and why that cannot be exact: to the bit it is only on what the run was made on."""
    reasons = []
    try:
        device = device_of(config)
    except ConfigError:
        device = torch.device("cpu")
        reasons.append("the run was on a GPU, of which there is none here")
    if not config.runtime.deterministic:
        reasons.append("runtime.deterministic is false")
    now = {"torch": torch.__version__, "machine": platform.machine()}
    for one in _environments(view):
        then = {"torch": (one.get("packages") or {}).get("torch"), "machine": one.get("machine")}
        reasons += [f"{name} was {then[name]}, is {now[name]}" for name in now if then[name] not in (None, now[name])]
    return device, list(dict.fromkeys(reasons))


def other_threads(view: RunView, config: Config) -> list[str]:
    """Why the order of additions may be another one: as many threads as cores, and there are others."""
    if config.runtime.threads is not None or torch.get_num_threads() == 1:
        return []
    known = [one.get("cores") for one in _environments(view)]
    cores = {count for count in known if isinstance(count, int)} - {os.cpu_count()}
    return [f"the run had {', '.join(map(str, sorted(cores)))} cores, here are {os.cpu_count()}"] if cores else []


def _environments(view: RunView) -> list[Mapping[str, Any]]:
    """What the run was made on, once for each time that it was started."""
    resumed = view.environment.get("resumed")
    found = [view.environment, *(resumed if isinstance(resumed, list) else [])]
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("packages") or {}, dict)]
