"""The paper's Algorithm 1 over roles behind doors: rollout, batch, updates, new weights, and what is written of it.

Holds no mathematics and no tensors, opens no files and prints nothing. It waits for its roles and for nothing else, and
may be cancelled at any of these waits: what has been done of a step is in the state, from which a resumed run goes on
to the same end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dapo.orchestrator.protocols import Learner, WeightSync
from dapo.orchestrator.run_state import Plan, RunState
from dapo.orchestrator.step_state import StepState
from dapo.rollout.engine import SampleError
from dapo.util.asynchronous import in_thread

if TYPE_CHECKING:
    from dapo.orchestrator.batch_builder import BatchBuilder
    from dapo.orchestrator.checkpointer import Checkpointer
    from dapo.orchestrator.collector import Collector
    from dapo.orchestrator.evaluator import Evaluator
    from dapo.orchestrator.recorder import Recorder


async def train(
    state: RunState,
    plan: Plan,
    collector: Collector,
    builder: BatchBuilder,
    learner: Learner,
    sync: WeightSync,
    evaluator: Evaluator,
    recorder: Recorder,
    checkpointer: Checkpointer,
) -> None:
    """Every rollout step until the plan is finished; the first one goes on where ``state`` stands inside of it."""
    async with collector.running():
        while not plan.finished(state):
            learner.begin_step(state.steps_done, state.budget.spent)
            if state.step is None:
                with state.doing("rollout", "the rollout"):
                    rollout = await collector.take(state.steps_done, plan.groups, learner.version)
                state.step = StepState(rollout)
            step = state.step
            recorder.begin(step)
            async with collector.parked(plan.colocated):
                if step.batch is None:  # stored, so a resumed step keeps its proximal log-probabilities
                    with state.doing("prepare", "the batch to be prepared"):
                        step.version = learner.version
                        annotated = await learner.annotate(await in_thread(builder.build, step.rollout.groups))
                        try:
                            finished = await in_thread(builder.finish, step.rollout.groups, annotated, step.version)
                        except SampleError:  # a resumed run samples anew
                            collector.release(step.rollout)
                            state.step = None
                            raise
                        step.groups, step.batch = finished
                count = builder.count(step.batch)
                for index, mini in builder.minibatches(step.batch, start=len(step.reports)):
                    with state.doing("update", f"update {index + 1} of {count}", index, count):
                        await learner.update(state.steps_done, index, mini, into=step)
                with state.doing("sync", "the weights to be handed to the engine"):
                    async with collector.changing_weights():
                        await sync.push(learner, collector.engine)
            after = state.after_step()
            evaluation = await evaluator.maybe(after)
            if not step.seconds:  # what follows counts as the next step's
                step.seconds, step.spans = state.spans.cut()
            with state.doing("writing", "metrics and samples to be written"):
                await recorder.write(step, after, evaluation)
            state.commit(after)
            collector.release(step.rollout)
            with state.spans("writing"):
                await checkpointer.maybe_save(last=plan.finished(state))
