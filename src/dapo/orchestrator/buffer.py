"""The experience buffer: dynamic sampling. Groups from the moment they are requested until they are trained on.

Consumes: prompts from a source, samples from an engine, rewards from a scorer. Produces: for each rollout step a
:class:`RolloutBatch` with the N groups to train on (raw rewards), those that were turned down, and counts. Decides
which groups those are (``algorithm/admission.py``) and how many prompts to draw; computes no loss, shapes no reward.

Waits for: samples and scores, nothing else. The engine and the scorer's deadline end each of these waits; the number of
draws in a step is bounded, so ``fill`` ends too. The first exception of engine, scorer or decoder ends it at once, as
does a cancellation: all tasks are cancelled and all streams closed. The next fill goes on with the samples that had
come; in deterministic mode the buffer is where it was before the fill, which is drawn again from its seeds.

Order: draws are numbered through the run, and the first N kept ones *in that order* are admitted, whatever the order
they finish in. Each sample has its own seed. So what a fill returns depends on when things finish only through the
number of prompts drawn, and under ``runtime.deterministic`` not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from dapo.config import Config
from dapo.errors import StarvedError
from dapo.orchestrator.pending_group import AcceptanceRate
from dapo.orchestrator.rollout_batch import Filling, FillStats, Progress, RolloutBatch
from dapo.records import Group, Prompt
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine

__all__ = ["ExperienceBuffer", "FillStats", "PromptStream", "RolloutBatch"]


class PromptStream(Protocol):
    """Where prompts come from: endless, and with a position that can be saved."""

    def draw(self) -> Prompt:
        """The next prompt."""
        ...

    def state(self) -> dict[str, Any]:
        """The position, in JSON types."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        ...


class ExperienceBuffer:
    """Groups from requested to trained. One fill at a time."""

    def __init__(
        self,
        source: PromptStream,
        engine: Engine,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        config: Config,
    ) -> None:
        self._source = source
        self._engine = engine
        self._scorer = scorer
        self._decode = decode
        self._config = config
        self._draws = 0
        self._keep_rate = AcceptanceRate()
        self._carried: tuple[Group, ...] = ()
        self._under_way: tuple[Group, ...] = ()
        self._rounds = 0
        self.unsettled = False
        """Whether the last fill did not come to its end, so that there is more here than between two steps."""
        self._before: _Position | None = None

    async def fill(
        self,
        step: int,
        train_version: int | None = None,
        progress: Progress = lambda done, total, note: None,
    ) -> RolloutBatch:
        """Sample until there are N groups with something to learn from (Eq. 11).

        With ``max_staleness`` 0, draws that can no longer be admitted are cancelled. Otherwise they are left to finish,
        and good groups beyond N wait for the next fill, as long as they are fresh. In deterministic mode all draws
        finish, and new ones are made only when none is in flight.

        Args:
            step: rollout step, from 0; for messages.
            train_version: policy version that will be trained on these groups, which staleness is counted to; by
                default the engine's version when the fill ends. A loop that samples ahead has to say it.

        Returns:
            Exactly N groups; fewer if the budget was spent and ``on_starved`` is ``train``. With filtering off: N
            draws, whatever their verdict, less those with fewer than two scores.

        Raises:
            StarvedError: the budget is spent and ``on_starved`` is ``stop``. What was kept waits for the next fill.
            RewardError: too many scores failed, or the reward leaves `correct` open under metric ``acc``.
            EngineError: the engine failed, or did not give back each requested sample exactly once.
        """
        if self._before is not None:
            raise RuntimeError("the buffer is being filled already")
        self._before = self._position()
        filling = None
        try:
            filling = Filling(
                step,
                draw=self._draw,
                engine=self._engine,
                scorer=self._scorer,
                decode=self._decode,
                config=self._config,
                keep_rate=self._keep_rate,
                carried=self._carried,
                resumed=self._under_way,
                rounds=self._rounds,
                train_version=train_version,
                progress=progress,
            )
            await filling.run()
            filling.scores.check(final=True)
            admission = filling.admission()
            starved = filling.filtering and not admission.complete
            stop = starved and self._config.algorithm.filter_groups.on_starved == "stop"
            self._keep_rate.learn(*filling.settled_draws(admission))
            fill = filling.result(admission, self._keep_rate.value())
            self._carried = fill.groups if stop else tuple(g for g, status in fill.rejected if status == "carried")
            self._under_way, self._rounds, self.unsettled = (), 0, stop
        except BaseException:
            if self._config.runtime.deterministic or filling is None:
                self._restore(self._before)
            else:  # what is finished is finished: the next fill goes on from there
                self._under_way, self._rounds = filling.under_way(), filling.rounds
                self.unsettled = bool(self._under_way)
            raise
        finally:
            self._before = None
        if stop:
            raise StarvedError(_starved_message(fill, self._config), fill)
        return fill

    def state(self) -> dict[str, Any]:
        """The position, for a checkpoint (``state.py``). While a fill is running: that before it."""
        position = self._before or self._position()
        return {field.name: getattr(position, field.name) for field in fields(position)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`. Raises DataError: it was taken over other data."""
        self._restore(_Position(**state))

    def drop_longer(self) -> int:
        """Drop carried groups with a response over ``rollout.max_response_length``, once larger; returns how many."""
        before, limit = self._carried, self._config.rollout.max_response_length
        self._carried = tuple(group for group in before if max(s.length for s in group.samples) <= limit)
        return len(before) - len(self._carried)

    def _position(self) -> _Position:
        rate = self._keep_rate
        source = self._source.state()
        return _Position(self._draws, rate.kept, rate.finished, source, self._carried, self._under_way, self._rounds)

    def _restore(self, position: _Position) -> None:
        self._draws = position.draws
        self._keep_rate = AcceptanceRate(position.keep_rate_kept, position.keep_rate_finished)
        self._source.load_state(position.source)
        self._carried = position.carried
        self._under_way, self._rounds = position.under_way, position.rounds

    def _draw(self) -> tuple[int, Prompt]:
        number = self._draws
        self._draws += 1
        return number, self._source.draw()


@dataclass(frozen=True, slots=True)
class _Position:
    """Between two fills: all that the next one depends on."""

    draws: int
    keep_rate_kept: float
    keep_rate_finished: float
    source: dict[str, Any]
    carried: tuple[Group, ...]
    under_way: tuple[Group, ...]
    """Draws of a fill that was interrupted, each with the samples that had come; none in deterministic mode."""
    rounds: int
    """Times that it had drawn prompts."""


def _starved_message(fill: RolloutBatch, config: Config) -> str:
    stats, wanted, filters = fill.stats, config.rollout.prompts_per_step, config.algorithm.filter_groups
    others = {"without spread in the reward": stats.flat, "with fewer than two scores": stats.too_few_scored}
    counts = {"all wrong": stats.all_wrong, "mixed": stats.mixed, "all right": stats.all_right}
    counts |= {name: count for name, count in others.items() if count}
    failed = f"{stats.failed_scores} of {stats.scores} scores failed. " if stats.failed_scores else ""
    kept, run = float(config.run.save_samples), config.run.dir or "runs/run"
    shown = f"\nWhat was drawn: dapo inspect {run} --samples" if kept else ""
    prompts = "harder prompts" if stats.all_right > stats.all_wrong else "easier prompts"
    return (
        f"step {fill.step + 1}: dynamic sampling kept {stats.kept} of the {wanted} groups wanted; in {stats.drawn} "
        f"draws (algorithm.filter_groups.max_num_gen_batches={filters.max_num_gen_batches} x {wanted}) there were "
        f"{', '.join(f'{count} {name}' for name, count in counts.items())}.\n"
        f"{failed}What may help: {prompts}; a larger rollout.samples_per_prompt (now "
        f"{config.rollout.samples_per_prompt}); a larger "
        "algorithm.filter_groups.max_num_gen_batches; algorithm.filter_groups.on_starved=train, to train on the groups "
        "there are. If nearly all are wrong, check that the reward finds the answer in the responses at all."
        f"{shown}"
    )
