"""One stage from its recipe to its summary: the loop that fine-tuning, preferences and reward models share.

Consumes: rows, and a :class:`~dapo.stages.stage.Stage`. Produces: a run folder as that of reinforcement learning, in
which a step is an update, and its summary. Waits for: its learner and the disk. It may be stopped anywhere; what has
been done of a step is in the state, from which a resumed run goes on to the same end, to the bit.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from dapo.config.reading import load_yaml, with_values
from dapo.config.secrets import redact
from dapo.config.stages import StageConfig, build_stage, load_stage
from dapo.data.examples import Example, open_examples, read_examples
from dapo.data.parts import open_table
from dapo.data.source import PromptSource
from dapo.errors import ConfigError, shortened
from dapo.model.export import export_dtype
from dapo.model.fingerprint import fingerprint_model
from dapo.model.loading import load_tokenizer
from dapo.model.placement import device_of, set_threads
from dapo.observe.fingerprint import fingerprint_tokenizer
from dapo.observe.progress import Listener
from dapo.observe.resources import ResourceRecorder
from dapo.observe.run_folder import RunFolder
from dapo.observe.run_view import is_run
from dapo.observe.trackers import check_trackers
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.checkpointer import Checkpointer, Stateful
from dapo.orchestrator.evaluator import when
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.kept_run import KeptRun
from dapo.orchestrator.launch import run_to_end
from dapo.orchestrator.model_writer import ModelWriter
from dapo.orchestrator.resume import require_nothing_in_memory
from dapo.orchestrator.run_state import Plan
from dapo.orchestrator.step_metrics import step_seconds
from dapo.orchestrator.step_state import StepState
from dapo.stages.dpo import DPO
from dapo.stages.learner import StageLearner
from dapo.stages.reward_model import RewardModel
from dapo.stages.sft import SFT
from dapo.stages.stage import Stage, in_parts
from dapo.training.update_report import UpdateReport
from dapo.util.asynchronous import in_thread
from dapo.util.differences import Difference, differences
from dapo.util.files import read_json, read_text, write_json
from dapo.util.memory import peak_memory
from dapo.util.shutdown import Shutdown

STAGES: Mapping[str, Callable[..., Stage]] = {"sft": SFT, "dpo": DPO, "reward_model": RewardModel}
MAY_CHANGE = (
    *("training.steps", "training.minutes", "training.samples", "training.tokens"),
    *("evaluation.", "run.", "runtime.threads", "model.export_dtype"),
)
"""Keys that a stage may go on with other values of."""


def run_stage(
    config: StageConfig, listener: Listener, inputs: RunOverrides | None = None, shutdown: Shutdown | None = None
) -> dict[str, Any]:
    """Train as ``config`` says and return the summary, which is also written to the run folder. Of ``inputs`` model,
    tokenizer, rows, heldout, trackers and resume are used.
    Errors as of :func:`dapo.orchestrator.launch.run_experiment`."""
    return run_to_end(StageRun(config, listener, inputs or RunOverrides()), shutdown)


def run_curve(config: StageConfig, times: int, listener: Listener, shutdown: Shutdown | None = None) -> dict[str, Any]:
    """Train ``times`` times from the same start, on the first rows of the data: of N at last, N / 2 before, and so on.
    Each is a run of its own inside of the run folder; ``curve.json`` there has rows and held-out numbers of each. One
    that is there goes on: nothing is left to do of one that was done. Raises ConfigError: it has other settings."""
    rows = config.data.rows or sum(len(open_table(item)) for item in config.data.train)
    root, found = Path(config.run.dir or "runs/run"), []
    for part in sorted({max(2, rows >> k) for k in range(times)}):
        folder = RunFolder(root / f"rows-{part}")
        point, there = with_values(config, {"data.rows": part, "run.dir": str(folder.root)}), is_run(folder.root)
        point = as_begun(folder, point) if there else point
        summary = run_stage(point, listener, RunOverrides(resume=folder if there else None), shutdown)
        found.append({"rows": part, **{n: v for n, v in summary.items() if n.endswith("_after")}})
        listener.phase(f"{part:,} rows: {', '.join(f'{n} {v:.4g}' for n, v in found[-1].items() if n != 'rows')}")
    write_json(root / "curve.json", found)
    return summary


@dataclass(frozen=True, slots=True)
class StageSetup:
    config: Any
    """With the steps of its epochs, and the day of its template."""
    overrides: RunOverrides
    device: torch.device
    tokenizer: Any
    stage: Stage
    open_source: Callable[[Callable[[str], None]], PromptSource]
    source: PromptSource
    heldout: Sequence[Example]
    held: Mapping[str, Any]
    """Fingerprint of ``heldout``."""

    @classmethod
    def of(cls, config: StageConfig, listener: Listener, given: RunOverrides) -> StageSetup:
        """Look at everything that is named but the weights. Nothing is written.
        Raises UserError: what is wrong, where, and what would work."""
        if given.resume is None:
            RunFolder.require_free(cast("Any", config))
        model, data, tell = config.model, config.data, listener.warning
        listener.phase("loading tokenizer and data")
        tokenizer = given.tokenizer or load_tokenizer(model.tokenizer or model.path, model.trust_remote_code)
        stage = STAGES[config.stage](config, tokenizer, given.model or model.path)
        open_source = partial(open_examples, given.rows or data.train, stage.encode, data, config.seed)
        source = open_source(tell)
        held = given.heldout or config.evaluation.data
        heldout, fingerprint = (
            read_examples(held, stage.encode, data, config.evaluation.rows, tell) if held else ((), {})
        )
        first = source.prompts[0].meta["examples"][0]
        read, learned = (repr(tokenizer.decode(list(ids))) for ids in (first.prompt, first.responses[0]))
        listener.phase(f"a row as the model sees it: {shortened(read, 300, ' ...')}, {shortened(learned, 200, ' ...')}")
        training = config.training
        if training.steps is None:
            steps = math.ceil((training.epochs or 1.0) * source.rows / training.rows_per_update)
            config = with_values(config, {"training.steps": steps, "training.epochs": None})
        if stage.today is not None:  # a run that goes on on another day has the same prompts
            config = with_values(config, {"data.today": stage.today})
        check_trackers(cast("Any", config))
        device = device_of(cast("Any", config))
        return cls(config, given, device, tokenizer, stage, open_source, source, heldout, fingerprint)


class StageRun(KeptRun):
    def __init__(self, config: StageConfig, listener: Listener, given: RunOverrides) -> None:
        """As :meth:`StageSetup.of`."""
        super().__init__(StageSetup.of(config, listener, given), listener)
        self.stage, self.source, self.heldout = self.setup.stage, self.setup.source, self.setup.heldout
        self.plan = Plan(self.config.training.rows_per_update, self.early_stopping)

    async def check(self) -> None:
        """Nothing is to be started."""

    def load(self, run: Callable[[Any], Any]) -> None:
        self.listener.phase("loading the model")
        setup, config = self.setup, self.config
        model = self.stage.load(setup.overrides.model or config.model.path, setup.device)
        self.fingerprint = {
            **fingerprint_model(model, setup.device),
            "tokenizer": fingerprint_tokenizer(setup.tokenizer),
            "data.train": self.source.fingerprint,
            "evaluation.data": setup.held,
        }
        set_threads(config, model)
        self._dtype = export_dtype(model, config.model.export_dtype)
        trainer = self.stage.trainer(model)
        self.model = trainer.policy.model
        self.learner = StageLearner(trainer, self.stage, self._out_of_time)
        self._closing.push_async_callback(self.learner.close)

    # -- where it starts -------------------------------------------------------------------------------------------

    def _place(self) -> Checkpointer:
        config, folder, tokenizer = self.config, self.folder, self.setup.tokenizer
        types = self._dtype, getattr(torch, config.model.compute_dtype)
        models = ModelWriter(folder, self.learner, tokenizer, self.listener.warning, self.stage.stop_ids, *types)
        roles: dict[str, Stateful] = {"rows": self.source, "alarms": self.alarms}
        self.learner.keep_faults(folder.faults, tokenizer.decode)
        return Checkpointer(folder, config.run, self.state, self.early_stopping, roles, models, self.shutdown)

    async def _go_on(self, latest: Path | None, contents: Sequence[Difference]) -> Mapping[str, Any]:
        tell_rows = partial(self.listener.working, "reference", total=len(self.heldout) + self.source.rows)
        await in_thread(self.stage.prepare, self.learner.trainer, self.folder.root, self._to_come(), tell_rows)
        if latest is not None:
            await self.checkpointer.load(latest)
        return {}

    async def _begin(self, kept: int | None, resources: ResourceRecorder | None) -> dict[str, Any]:
        self._resources = resources
        if kept is None or kept < 0:
            await self.checkpointer.models.write_before()
            if found := await self._evaluate("before training", 0):
                self.state.scores["before"] = found
                self.metrics.append(0, found)
                self.checkpointer.note_best()
        training = self.config.training
        return {"steps": training.steps, "rows per update": training.rows_per_update, "rows": self.source.rows}

    def _to_come(self) -> Iterator[Sequence[Example]]:
        """Held-out rows, as they are evaluated, and all rows that the run is going to draw, each once. A mixture draws
        some rows again long before others."""
        yield from in_parts(self.heldout)
        source, seen = self.setup.open_source(lambda text: None), set[int]()
        for part in in_parts(range(self.config.training.steps * self.plan.groups)):
            if all(epoch for epoch, _ in source.state()["positions"]):
                return
            rows = {row.row: row.meta["examples"] for row in (source.next() for _ in part)}
            yield [one for number, examples in rows.items() if number not in seen for one in examples]
            seen |= rows.keys()

    # -- a step ----------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        while not self.plan.finished(self.state):
            await self._step()

    async def _step(self) -> None:
        """One update, unless it was made already, its evaluation, its metrics and its checkpoint."""
        state, learner, plan = self.state, self.learner, self.plan
        learner.begin_step(state.steps_done, state.budget.spent)
        if state.step is None:
            position, step = self.source.state(), StepState(None)  # type: ignore[arg-type]  # nothing is sampled
            try:
                with state.spans("prepare"):
                    rows = [self.source.next() for _ in range(self.plan.groups)]
                    batch = self.stage.batch([one for row in rows for one in row.meta["examples"]])
                with state.doing("update", "an update"):
                    await learner.update(state.steps_done, 0, batch, into=step)
            finally:  # it was made, or it was not, whatever came meanwhile
                state.step = step if step.reports else None
                if state.step is None:
                    self.source.load_state(position)
        after = state.after_step()
        every, evaluation = self.config.evaluation.every, {}
        if after.used_up or (every and after.steps % every == 0):
            with state.spans("evaluation"):
                evaluation = await self._evaluate(when(after), after.steps)
                state.scores["after"] = evaluation
        assert state.step is not None
        seconds, _ = state.spans.cut()
        self._record(after, state.step.reports[0], seconds, evaluation)
        state.commit(after)
        with state.spans("writing"):
            await self.checkpointer.maybe_save(last=plan.finished(state))

    async def _evaluate(self, name: str, step: int) -> dict[str, float]:
        if not self.heldout:
            return {}
        self.shutdown.doing = f"the evaluation {name}"
        self.listener.phase(f"evaluating {name}")
        found = await self.learner.evaluate(self.heldout)
        self.early_stopping.observe(step, found)
        self.listener.evaluated(name, dict(found))
        return found

    def _record(self, after: Budget, report: UpdateReport, seconds: Mapping[str, float], found: Any) -> None:
        facts, update = self.learner.facts, seconds.get("update", 0.0)
        metrics: dict[str, Any] = {
            "loss": report.loss,
            **{name: total / count for name, (total, count) in report.statistics.items() if count},
            "grad_norm": report.grad_norm,
            "grad_norm/max": report.grad_norm,
            "lr": report.learning_rate,
            "updates": int(report.skipped is None),
            "updates/skipped": int(report.skipped is not None),
            "updates/total": facts.updates,
            "epoch": self.source.epoch,
            "tokens/loss": report.loss_tokens,
            "tokens/trained": report.tokens,
            "tokens/computed": report.computed_tokens,
            **{f"time/{name}": getattr(report, f"seconds_{name}") for name in ("forward", "backward", "optimizer")},
            "time/wall": sum(seconds.values()),
            **{f"time/{name}": seconds.get(name, 0.0) for name in ("prepare", "update", "evaluation")},
            "time/step": step_seconds(seconds),
            "time/training": after.seconds,
            "time/elapsed": self.state.seconds.total,
            "tokens_per_second/update": report.tokens / update if update else 0.0,
            "memory/rss": peak_memory(),
            **found,
            **(self._resources.step_means() if self._resources is not None else {}),
        }
        count, alarms = self.alarms.observe(after.steps, metrics)
        for warning in [*alarms, *([f"the update was skipped: {report.skipped}"] if report.skipped else [])]:
            self.listener.warning(f"step {after.steps}: {warning}")
        entry = self.metrics.append(after.steps, metrics | count)
        self.listener.step(after.steps, self.config.training.steps, entry)
        self.alarms.settle()

    # -- its end ---------------------------------------------------------------------------------------------------

    def _how_to_go_on(self) -> str:
        stage, root = self.config.stage, self.folder.root
        if self.setup.overrides.in_memory:
            return f'dapo.{stage}(...) with the same arguments and resume="{root}"'
        return f"dapo {stage.replace('_', '-')} --resume {shlex.quote(str(root))}"

    def _facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"stage": self.config.stage, "updates": self.learner.facts.updates}
        if self.heldout:
            facts["heldout_rows"] = len(self.heldout)
        for time, found in self.state.scores.items():
            facts |= {f"{n.removeprefix('eval/')}_{time}": v for n, v in found.items() if n != "eval/rows"}
        best = self.early_stopping
        return facts | ({"best": {"step": best.step, best.metric: best.value}} if best.step >= 0 else {})


def resume_stage(stage: str, run: Path, overrides: Sequence[str] = ()) -> StageConfig:
    """The recipe of a stage that goes on. Raises ConfigError: ``run`` is none, or a key differs that may not."""
    folder = RunFolder(run)
    try:
        require_nothing_in_memory(run)
    except ConfigError as error:
        raise ConfigError(str(error).replace("dapo.train", f"dapo.{stage}")) from None
    if not folder.config.is_file():
        raise ConfigError(f"--resume {run}: not a run folder: it holds no config.yaml")
    config = load_stage(stage, folder.config, [*overrides, f"run.dir={run}"])
    return as_begun(folder, config)


def as_begun(folder: RunFolder, config: StageConfig) -> StageConfig:
    """``config`` with what the stage in ``folder`` found when it began: the steps of its epochs, and the day.
    Raises ConfigError: a key differs from what that stage has, and may not."""
    try:
        stored = read_json(folder.fingerprint)["settings"]
    except (OSError, ValueError, KeyError, TypeError):  # killed before it was written
        stored = load_yaml(read_text(folder.config))
    then = redact(build_stage(config.stage, stored, str(folder.fingerprint)).model_dump(mode="json"))
    if config.training.steps is None:
        config = with_values(config, {"training.steps": then["training"]["steps"], "training.epochs": None})
    if getattr(config.data, "today", 0) is None and (day := then["data"].get("today")):
        config = with_values(config, {"data.today": date.fromisoformat(day)})
    changed = differences(then, redact(config.model_dump(mode="json")))
    if refused := [f"{one}" for one in changed if not one.key.startswith(MAY_CHANGE)]:
        lines = "\n".join(refused)
        raise ConfigError(
            f"{folder.root}: these settings differ from those of the run, and would make it another one:\n{lines}\n"
            "For other settings begin another run (run.dir), from the weights of this one if need be (model.path)"
        )
    return config
