"""One stage from its recipe to its summary: the loop that fine-tuning, preferences and reward models share.

Consumes: rows, and a :class:`~dapo.stages.stage.Stage`. Produces: a run folder as that of reinforcement learning, in
which a step is an update, and its summary. Waits for: its learner and the disk. It may be stopped anywhere; what has
been done of a step is in the state, from which a resumed run goes on to the same end, to the bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dapo.errors import ConfigError, UserError, shortened
from dapo.evaluation.early_stopping import EarlyStopping
from dapo.model.export import export_dtype
from dapo.model.fingerprint import fingerprint_model
from dapo.model.loading import load_tokenizer
from dapo.model.placement import determinism, device_of, set_threads
from dapo.observe.alarms import Alarms
from dapo.observe.fingerprint import check_fingerprint, fingerprint_tokenizer
from dapo.observe.metrics import MetricsLog
from dapo.observe.progress import Listener
from dapo.observe.resources import make_recorder
from dapo.observe.run_folder import RunFolder
from dapo.observe.trackers import check_trackers, make_trackers
from dapo.orchestrator.budget import Budget
from dapo.orchestrator.checkpointer import Checkpointer, Stateful
from dapo.orchestrator.evaluator import when
from dapo.orchestrator.inputs import RunOverrides
from dapo.orchestrator.launch import run_to_end
from dapo.orchestrator.model_writer import ModelWriter
from dapo.orchestrator.resume import require_nothing_in_memory
from dapo.orchestrator.run_state import Plan, RunState
from dapo.orchestrator.step_metrics import step_seconds
from dapo.orchestrator.step_state import StepState
from dapo.stages.dpo import DPO
from dapo.stages.learner import StageLearner
from dapo.stages.reward_model import RewardModel
from dapo.stages.sft import SFT
from dapo.stages.stage import Stage, in_parts
from dapo.training.update_report import UpdateReport
from dapo.util.asynchronous import in_thread
from dapo.util.differences import differences
from dapo.util.files import read_json, read_text, write_json, writing
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
    Each is a run of its own inside of the run folder; ``curve.json`` there has rows and held-out numbers of each."""
    rows = config.data.rows or sum(len(open_table(item)) for item in config.data.train)
    root, found = Path(config.run.dir or "runs/run"), []
    for part in sorted({max(2, rows >> k) for k in range(times)}):
        values = {"data.rows": part, "run.dir": str(root / f"rows-{part}")}
        summary = run_stage(with_values(config, values), listener, None, shutdown)
        found.append({"rows": part, **{n: v for n, v in summary.items() if n.endswith("_after")}})
        listener.phase(f"{part:,} rows: {', '.join(f'{n} {v:.4g}' for n, v in found[-1].items() if n != 'rows')}")
    write_json(root / "curve.json", found)
    return summary


class StageRun:
    """One stage. To be called in this order: :meth:`check`, :meth:`load`, :meth:`run`, :meth:`close`."""

    def __init__(self, config: StageConfig, listener: Listener, given: RunOverrides) -> None:
        """Look at everything that is named but the weights. Nothing is written yet.
        Raises UserError: what is wrong, where, and what would work."""
        model, data = config.model, config.data
        listener.phase("loading tokenizer and data")
        tokenizer = given.tokenizer or load_tokenizer(model.tokenizer or model.path, model.trust_remote_code)
        self.stage = STAGES[config.stage](config, tokenizer, given.model or model.path)
        encode, told = self.stage.encode, listener.warning
        self._open_source = partial(open_examples, given.rows or data.train, encode, data, config.seed)
        self.source = self._open_source(told)
        self.heldout: Sequence[Example] = ()
        self._held: dict[str, Any] = {}
        if held := given.heldout or config.evaluation.data:
            self.heldout, self._held = read_examples(held, encode, data, config.evaluation.rows, told)
        first = self.source.prompts[0].meta["examples"][0]
        read, learned = (repr(tokenizer.decode(list(ids))) for ids in (first.prompt, first.responses[0]))
        listener.phase(f"a row as the model sees it: {shortened(read, 300, ' ...')}, {shortened(learned, 200, ' ...')}")
        training = config.training
        if training.steps is None:
            steps = math.ceil((training.epochs or 1.0) * self.source.rows / training.rows_per_update)
            config = with_values(config, {"training.steps": steps, "training.epochs": None})
        if (today := self.stage.today) is not None:  # a run that goes on on another day has the same prompts
            config = with_values(config, {"data.today": today})
        self.config = cast("Any", config)  # the sections that it shares with a run are read as those of a run
        check_trackers(self.config)
        self._given, self._listener, self._tokenizer = given, listener, tokenizer
        self.state = RunState(Budget(self.config.training), tell=lambda role, what, done, total: None)
        self.shutdown = Shutdown()  # nobody has told it to
        self._closing = contextlib.AsyncExitStack()
        self._closing.enter_context(self.state.seconds.counting())
        self._closing.enter_context(determinism(self.config, device_of(self.config)))
        self._best = EarlyStopping(self.config.evaluation)
        if given.resume is None:
            RunFolder.require_free(self.config)

    async def check(self) -> None:
        """Nothing is to be started."""

    def load(self, run: Callable[[Any], Any]) -> None:
        """Load the model. Raises UserError: it cannot be loaded or trained."""
        self._listener.phase("loading the model")
        device = device_of(self.config)
        model = self.stage.load(self._given.model or self.config.model.path, device)
        self._fingerprint = {
            **fingerprint_model(model, device),
            "tokenizer": fingerprint_tokenizer(self._tokenizer),
            "data.train": self.source.fingerprint,
            "evaluation.data": self._held,
        }
        set_threads(self.config, model)
        self._dtype = export_dtype(model, self.config.model.export_dtype)
        trainer = self.stage.trainer(model)
        self.learner = StageLearner(trainer, self.stage, self._out_of_time)
        self._closing.push_async_callback(self.learner.close)

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate; whatever happens in between, what was learned is written down."""
        plan = self._plan = Plan(self.config.training.rows_per_update, self._best)
        await self._open()
        self.state.seconds.credit("start")
        try:
            with self.state.spans.counting():
                while not plan.finished(self.state):
                    await self._step()
        except BaseException as error:
            note = await self._rescue(error)
            if isinstance(error, UserError):
                raise type(error)(f"{error}\n{note}") from None
            self._listener.warning(note)
            raise
        with self.state.seconds("writing"):
            await self._checkpointer.models.write_after()
        return self._summarise(plan.reason(self.state))

    async def close(self) -> None:
        await self._closing.aclose()

    # -- where it starts -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """A new run folder, or one that goes on from its latest checkpoint.
        Raises UserError: the folder cannot be used, or the run started from something else."""
        config, tell, resume = self.config, self._listener.warning, self._given.resume
        folder = self._folder = resume or RunFolder.create(config, tell=tell)
        self.shutdown.run = folder.root
        self._alarms = Alarms(config)
        dtype = getattr(torch, config.model.compute_dtype)
        models = ModelWriter(folder, self.learner, self._tokenizer, tell, self.stage.stop_ids, self._dtype, dtype)
        roles: dict[str, Stateful] = {"rows": self.source, "alarms": self._alarms}
        self._checkpointer = Checkpointer(folder, config.run, self.state, self._best, roles, models, self.shutdown)
        self._closing.push_async_callback(self._checkpointer.close)
        self.learner.keep_faults(folder.faults, self._tokenizer.decode)
        latest, kept = None, None
        if resume is not None:
            check_fingerprint(folder.fingerprint, self._fingerprint, self._listener, config.runtime.deterministic)
            latest = await in_thread(self._checkpointer.checkpoints.latest_intact, tell)
            self._listener.phase(f"going on from {latest}" if latest else "no checkpoint yet: from the start")
        tell_rows = partial(self._listener.working, "reference", total=len(self.heldout) + self.source.rows)
        await in_thread(self.stage.prepare, self.learner.trainer, folder.root, self._to_come(), tell_rows)
        if latest is not None:
            await self._checkpointer.load(latest)
        if resume is not None:
            folder.reopen(config)
            if not self.state.budget.used_up:  # of a shorter run
                shutil.rmtree(folder.model_after, ignore_errors=True)
            kept = self.state.steps_done if latest is not None else -1
        with writing(folder.fingerprint):
            settings = {"settings": redact(config.model_dump(mode="json")), "in_memory": self._given.in_memory}
            write_json(folder.fingerprint, {**self._fingerprint, **settings})
        self._resources = make_recorder(folder.resources, config.run.resources_every_s)
        if self._resources is not None:
            self._closing.callback(self._resources.close)
        looks = self._resources.latest if self._resources else list
        trackers = make_trackers(config, folder, kept, tell, looks, self._given.trackers)
        self._metrics = self._closing.enter_context(MetricsLog(folder.metrics, kept, trackers))
        if latest is None:
            await models.write_before()
            if found := await self._evaluate("before training", 0):
                self.state.scores["before"] = found
                self._metrics.append(0, found)
                self._checkpointer.note_best()
        training = config.training
        told = {"steps": training.steps, "rows per update": training.rows_per_update, "rows": self.source.rows}
        self._listener.started(told)

    def _to_come(self) -> Iterator[Sequence[Example]]:
        """Held-out rows, as they are evaluated, and all rows that the run is going to draw, each once. A mixture draws
        some rows again long before others."""
        yield from in_parts(self.heldout)
        source, seen = self._open_source(lambda text: None), set[int]()
        for part in in_parts(range(self.config.training.steps * self._plan.groups)):
            if all(epoch for epoch, _ in source.state()["positions"]):
                return
            rows = {row.row: row.meta["examples"] for row in (source.next() for _ in part)}
            yield [one for number, examples in rows.items() if number not in seen for one in examples]
            seen |= rows.keys()

    # -- a step ----------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        """One update, unless it was made already, its evaluation, its metrics and its checkpoint."""
        state, learner, plan = self.state, self.learner, self._plan
        learner.begin_step(state.steps_done, plan.spent(state))
        if state.step is None:
            position, step = self.source.state(), StepState(None)  # type: ignore[arg-type]  # nothing is sampled
            try:
                with state.spans("prepare"):
                    rows = [self.source.next() for _ in range(self._plan.groups)]
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
            await self._checkpointer.maybe_save(last=plan.finished(state))

    async def _evaluate(self, name: str, step: int) -> dict[str, float]:
        if not self.heldout:
            return {}
        self.shutdown.doing = f"the evaluation {name}"
        self._listener.phase(f"evaluating {name}")
        found = await self.learner.evaluate(self.heldout)
        self._best.observe(step, found)
        self._listener.evaluated(name, dict(found))
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
        count, alarms = self._alarms.observe(after.steps, metrics)
        for warning in [*alarms, *([f"the update was skipped: {report.skipped}"] if report.skipped else [])]:
            self._listener.warning(f"step {after.steps}: {warning}")
        entry = self._metrics.append(after.steps, metrics | count)
        self._listener.step(after.steps, self.config.training.steps, entry)
        self._alarms.settle()

    # -- its end ---------------------------------------------------------------------------------------------------

    def _out_of_time(self) -> bool:
        return self.shutdown.seconds_left < self._checkpointer.seconds_to_save

    async def _rescue(self, error: BaseException) -> str:
        """Write down what was learned before ``error`` ended the run, and say where. Raises no error of its own."""
        stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        with contextlib.suppress(Exception):  # this state is further than that of the checkpoint that failed
            await self._checkpointer.settle()
        done = f"steps done: {self.state.steps_done}"
        try:
            await self._checkpointer.save_checkpoint(wait=True)
            self._summarise("interrupted" if stopped else f"{type(error).__name__}: {error}")
        except Exception as fault:
            return f"{done}; the state could not be saved: {fault}; the last checkpoint is {self.shutdown.saved}"
        how = f"dapo {self.config.stage.replace('_', '-')} --resume {self._folder.root}"
        if self._given.in_memory:
            how = f'dapo.{self.config.stage}(...) with the same arguments and resume="{self._folder.root}"'
        return f"{done}; the state is in {self.shutdown.saved}; to go on: {how}"

    def _summarise(self, stopped: str) -> dict[str, Any]:
        scores = self.state.scores
        summary: dict[str, Any] = {
            "run_dir": str(self._folder.root),
            "stage": self.config.stage,
            "seed": self.config.seed,
            "steps": self.state.steps_done,
            "updates": self.learner.facts.updates,
            "stopped": redact(stopped),
            "seconds_total": round(self.state.seconds.total, 2),
        }
        if self.heldout:
            summary["heldout_rows"] = len(self.heldout)
        for time, found in scores.items():
            summary |= {f"{n.removeprefix('eval/')}_{time}": v for n, v in found.items() if n != "eval/rows"}
        if self._best.step >= 0:
            summary["best"] = {"step": self._best.step, self._best.metric: self._best.value}
        self._folder.write_summary(summary)
        self._metrics.summarise(summary)
        return summary


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
            "To train on with other settings, start a new run from its weights (model.path)"
        )
    return config
