"""Every metric of a run by name, with its unit and meaning, and the log that keeps one JSON object per rollout step.

Consumes: a mapping of registered names to numbers, once a step. Produces: ``metrics.jsonl``, flushed line by line, so
that a killed run loses at most the line being written; half a line at the end is cut off when the log is opened again.
A name that is not in the table is refused: a metric nobody can look up means nothing to its reader.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.errors import UserError
from dapo.observe.tracker import Tracker, close_all
from dapo.util.files import json_line, lines_of, parse_json, write_atomic, writing


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. ``{}`` in the name stands for one path element of the user's, such as a part's name."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        if "{}" not in self.name:
            return name == self.name
        return re.fullmatch(re.escape(self.name).replace(r"\{\}", r"[^/\s]+"), name) is not None


_TABLE = """
response_length/mean       | tokens       | mean length of all samples generated, the stop token counted
response_length/max        | tokens       | longest sample generated
response_length/truncated  | share        | samples cut at max_response_length
response_length/kept_mean  | tokens       | mean length of the samples that were trained on
reward/mean                | reward       | mean raw reward of all scored samples, before shaping
reward/std                 | reward       | standard deviation of the same
reward/shaped_mean         | reward       | mean reward after shaping (Eq. 13), of the samples that were trained on
reward/part/{}             | reward       | mean of one part of the reward, by its name
reward/overlong            | share        | trained samples that were punished for their length
reward/errors              | share        | samples whose score failed; they have no verdict
reward/no_answer           | share        | scored samples in which no final answer was found
monitor/reward             | reward       | mean raw reward of the samples that the held-out check scored
monitor/check              | reward       | mean of the held-out check (monitor.check) on the same samples
monitor/false_right        | share        | of those that the reward calls right, samples that the check calls wrong
monitor/check_errors       | share        | checked samples whose check failed
monitor/length_correlation | correlation  | of raw reward and response length within groups
monitor/alarms             | alarms       | signs of reward hacking that are on: false right, divergence, length
monitor/alarms/{}          | alarms       | whether one of them is on: false_right, divergence, length
alarms/count               | alarms       | alarms on the course of the metrics that are on (alarms.md)
accuracy                   | share        | correct samples among all scored ones, kept and filtered groups alike
entropy                    | nats         | mean entropy of the policy over loss tokens, before the update (Fig. 2b)
probability/mean           | probability  | mean probability of the sampled tokens under the policy, before each update
clip/low                   | share        | loss tokens clipped at 1 - clip_ratio_low (advantage below 0)
clip/high                  | share        | loss tokens clipped at 1 + clip_ratio_high (advantage above 0)
clip/dual                  | share        | loss tokens capped by the dual clip
clip/high_probability      | probability  | mean probability of the up-clipped tokens (Fig. 3a)
ratio/mean                 | ratio        | mean of pi_theta / pi_prox over loss tokens
objective/{}               | its own      | mean of a statistic of a user's objective, by its name
loss                       | loss         | mean over the updates; near 0 by construction, see grad_norm (not in stages)
preference/accuracy        | share        | stages: pairs whose better response has the higher reward, or right labels
preference/margin          | reward       | stages: reward of the better response less that of the other
preference/chosen          | reward       | stages: reward of the better responses (DPO: beta (log pi - log ref))
preference/rejected        | reward       | stages: the same of the worse ones
preference/chosen_logprob  | nats         | DPO: log-probability of the better responses (dpo.nll keeps it up)
preference/rejected_logprob | nats        | DPO: the same of the worse ones
preference/score           | reward       | outcome models: mean score of the texts
critic/loss                | loss         | PPO: mean value loss over loss tokens and updates
critic/clipped             | share        | PPO: loss tokens whose value has moved further than critic.clip in the step
critic/values              | reward       | PPO: mean value of the states of loss tokens
critic/returns             | reward       | PPO: mean return that they are to predict, with a KL in the reward
critic/explained_variance  | ratio        | PPO: of the returns, by the values before the updates; at most 1
critic/grad_norm           | norm         | PPO: mean gradient norm of the critic's updates, before clipping
critic/skipped             | share        | PPO: updates of the critic that were skipped because a number was not finite
advantage/mean             | advantage    | PPO: mean over loss tokens, after whitening if asked for (then 0)
advantage/std              | advantage    | PPO: standard deviation of the same (whitened: 1)
advantage/mean_abs         | advantage    | mean absolute advantage over loss tokens
tokens/loss                | tokens       | loss tokens of the step, over all its updates
tokens/generated           | tokens       | response tokens that came in the step, filtered and surplus groups included
tokens/wasted              | tokens       | those of surplus, stale and cancelled draws
tokens/filtered            | tokens       | those of groups that had nothing to learn from: what dynamic sampling costs
tokens/trained             | tokens       | of prompts and responses in the updates, each as often as it is in one
tokens/computed            | tokens       | the same, but a shared prompt once, and not the last token of a response
grad_norm                  | norm         | mean gradient norm over the updates, before clipping
grad_norm/max              | norm         | largest gradient norm of the updates
updates                    | count        | optimizer updates made in the step
updates/skipped            | count        | updates left out: loss or gradient not finite, or no token in the loss
updates/total              | count        | optimizer updates since the start of the run
version                    | count        | policy version after the step
lr                         | rate         | learning rate of the step
groups/drawn               | groups       | prompts drawn and sampled in the step
groups/kept                | groups       | groups that were trained on
groups/mixed               | groups       | groups with something to learn from, trained on or not
groups/all_right           | groups       | filtered: every sample right (Fig. 3b, as a count)
groups/all_wrong           | groups       | filtered: every sample wrong
groups/flat                | groups       | filtered: no spread in the reward (metric score)
groups/unscored            | groups       | filtered: fewer than two samples with a verdict
groups/surplus             | groups       | good groups beyond N, discarded
groups/carried             | groups       | finished groups that wait for the next step
groups/cancelled           | groups       | draws stopped because N groups had been found
groups/stale               | groups       | good groups that became too old and were dropped
groups/unfinished          | groups       | if S >= 1: draws that went on when the batch was handed out
samples/continued          | samples      | if S >= 1: of draws finished in the step, with tokens of several versions
samples/restarted          | samples      | if S >= 1: begun again under newer weights
engines/replaced           | count        | if runtime.kind=ray: engines that died, since the run was started
engines/asked_again        | samples      | unfinished ones of these, which others were asked for
draws/{}                   | groups       | if S >= 1: since the run began, produced and what became of them (its sum)
groups/share_all_right     | share        | groups/all_right over the groups that were scored (Fig. 3b)
groups/share_all_wrong     | share        | groups/all_wrong over the groups that were scored
sampling/expected          | share        | data.sampling=difficulty: chance of a mixed group, mean of the prompts drawn
sampling/expected_uniform  | share        | the same of all rows: what uniform draws would give
sampling/known             | share        | rows that were sampled at least once
live/drawn                 | prompts      | data.live: prompts drawn so far
live/feedback              | lines        | feedback so far that made a prompt be drawn (again)
live/waiting               | prompts      | ready and not drawn yet
live/expired               | prompts      | dropped so far as stale or too many, feedback among them
live/bad                   | lines        | skipped so far
proposer/asked             | requests     | data.proposer: requests for proposals so far
proposer/accepted          | prompts      | proposals so far that are new and whose answer holds
proposer/repeated          | prompts      | refused so far: seen before
proposer/wrong             | prompts      | refused so far: the answer does not hold
proposer/evaluation        | prompts      | refused so far: shares words with rows to evaluate on
proposer/bad               | prompts      | refused so far: no JSON object with prompt and answer, or too long
proposer/failed            | requests     | requests so far without a reply
proposer/drawn             | groups       | proposals so far that the policy has tried
proposer/reward            | reward       | mean of 1 - abs(2p - 1), p the pass rate, of the last 100 of them
groups/keep_rate           | share        | running estimate: groups with something to learn from, of those drawn
groups/draws_per_kept      | ratio        | groups drawn over groups kept
groups/rounds              | count        | rounds of drawing that it took to fill the batch
staleness/mean             | versions     | mean age of the oldest token of each trained group
staleness/max              | versions     | largest such age
staleness/groups/{}        | groups       | if S >= 1: trained groups whose oldest token is so many versions old
mismatch/mean              | nats         | mean |log pi_engine - log pi_trainer|, samples all of this version, if any
mismatch/max               | nats         | largest such difference
mismatch/k3                | nats         | k3 estimate of KL(engine || trainer) on the same tokens
mismatch/tail              | share        | of the same tokens, those with pi_trainer / pi_engine outside [0.9, 1.1]
correction/mean            | ratio        | mean weight of the importance correction
kl/reference               | nats         | KL to the initial policy for each loss token, by the estimator asked for
kl/proximal                | nats         | k3 estimate of KL(pi_prox || pi_theta): how far the updates of a step moved
kl/coef                    | coefficient  | coefficient of the KL term in the step
time/wall                  | seconds      | since the metrics of the step before: all phases down to time/rest
time/rollout               | seconds      | waiting for samples, and for scores as far as samples still come
time/reward_wait           | seconds      | waiting for rewards after the last sample had come
time/prepare               | seconds      | shaping, advantages, packing and the proximal forward pass
time/forward               | seconds      | forward passes of the updates
time/backward              | seconds      | their backward passes
time/optimizer             | seconds      | clipping the gradient and the optimizer
time/sync                  | seconds      | handing the new weights to the engine
time/evaluation            | seconds      | evaluation
time/rest                  | seconds      | all else, such as samples and checkpoints of the step before
time/update                | seconds      | the updates: forward, backward, optimizer and what lies between them
time/step                  | seconds      | time/wall less evaluation and writing: what training.minutes counts
time/training              | seconds      | of all rollout steps so far, without evaluation and writing files
time/elapsed               | seconds      | since the run started
overlap/wall               | seconds      | if S >= 1, as the next four: since the batch before, evaluation left out
overlap/seconds            | seconds      | of these, sampling beside the learner's work: what taking turns would add
overlap/won                | share        | overlap/seconds over both together, if the engine has a device of its own
idle/engine                | seconds      | of overlap/wall, nothing to sample, and not parked for the learner
idle/learner               | seconds      | of overlap/wall, waiting for a batch
tokens_per_second/rollout  | tokens/s     | response tokens that came since the batch before, per second of sampling
tokens_per_second/update   | tokens/s     | tokens of prompts and responses trained on, over time/update
tokens_per_second/total    | tokens/s     | response tokens generated over time/step
samples_per_second         | samples/s    | samples trained on over time/step
share/matmul               | share        | of the card's matmul rate in time/update (MFU): 6 x parameters used x tokens
share/bandwidth            | share        | of the card's memory bandwidth that decoding needs, while it samples
memory/rss                 | bytes        | most memory that the process has held
resources/cpu              | cores        | CPU used by the run, mean over the step; resources.jsonl has each role
resources/memory           | bytes        | resident memory of the same
resources/gpu              | share        | of the time that the GPUs were busy, mean over them
resources/gpu_memory       | bytes        | of the GPUs in use, whoever uses it
resources/gpu_power        | W            | of the GPUs together
resources/disk_read        | bytes/s      | read from disk by the run's processes
resources/disk_write       | bytes/s      | written to disk by the run's processes
resources/net_sent         | bytes/s      | sent by the host
resources/net_received     | bytes/s      | received by the host
epoch                      | epochs       | passes over the training rows so far
eval/accuracy              | share        | correct samples on the evaluation rows, as the mean over rows (avg@k)
eval/accuracy_low          | share        | lower bound of its 95% interval: Wilson's, or bootstrap over rows
eval/accuracy_high         | share        | upper bound of the same
eval/pass@{}               | share        | chance that so many samples of a row hold a correct one (unbiased), if k > 1
eval/maj@{}                | share        | chance that the most frequent answer of so many samples is right, if k > 1
eval/reward                | reward       | mean raw reward on the evaluation rows
eval/response_length       | tokens       | mean length on the evaluation rows
eval/truncated             | share        | truncated samples on the evaluation rows
eval/no_answer             | share        | evaluation samples in which no final answer was found
eval/lenient               | share        | correct, or ending with the right number, if all references are numbers
eval/part/{}               | reward       | mean of one part of the reward on the evaluation rows, by its name
eval/metric/{}             | its own      | what a function of evaluation.metrics gave, by its name
eval/loss                  | loss         | stages: on the evaluation rows
eval/margin                | reward       | stages: as preference/margin, on the evaluation rows, as the next five
eval/chosen                | reward       | stages: reward of the better responses
eval/rejected              | reward       | stages: of the worse ones
eval/chosen_logprob        | nats         | DPO: log-probability of the better responses
eval/rejected_logprob      | nats         | DPO: of the worse ones
eval/calibration_error     | share        | stages: expected calibration error of sigmoid(margin), or of sigmoid(score)
eval/rows                  | rows         | evaluation rows used
eval/errors                | share        | evaluation samples whose score failed, if any; they count nowhere else
"""


PHASES = ("rollout", "reward_wait", "prepare", "update", "sync", "evaluation")
"""Parts of a step with a metric ``time/...`` each, in the order in which they come; no two overlap."""

METRICS: dict[str, Metric] = {
    row[0].strip(): Metric(*map(str.strip, row)) for line in _TABLE.strip().splitlines() if (row := line.split(" | "))
}
"""The registry: name (or pattern) to metric, in the order in which they are shown."""


def describe(name: str) -> Metric | None:
    return METRICS.get(name) or next((metric for metric in METRICS.values() if metric.matches(name)), None)


class MetricsLog(contextlib.AbstractContextManager["MetricsLog", None]):
    """metrics.jsonl: one JSON object per rollout step, ``step`` first.

    A value that is not finite is written as null, and its text under ``non_finite``, so that the file stays JSON and
    the event is not lost.

    Args:
        path: the file, opened for appending; made if missing.
        keep_until: on resume, the last step to keep: lines of later steps are removed.
        trackers: where else the metrics of each step go. They are closed with the log.
    """

    def __init__(self, path: Path, keep_until: int | None = None, trackers: Sequence[Tracker] = ()) -> None:
        self.path = path
        self._trackers = trackers
        if path.exists():
            kept = [entry for entry in read_metrics(path) if keep_until is None or entry["step"] <= keep_until]
            write_atomic(path, map(json_line, kept))
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write the line of ``step`` and return it as it was written. Raises KeyError: a name is not in the table (a
        fault of the program, not of the user); UserError: the file cannot be written."""
        unknown = [name for name in metrics if describe(name) is None]
        if unknown:
            raise KeyError(f"metrics that are not registered in observe/metrics.py: {', '.join(unknown)}")
        numbers = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        odd = {name: str(n) for name, n in numbers.items() if isinstance(n, float) and not math.isfinite(n)}
        entry = {"step": step} | numbers | dict.fromkeys(odd) | ({"non_finite": odd} if odd else {})
        with writing(self.path):
            self._file.write(json_line(entry))
            self._file.flush()
        for tracker in self._trackers:
            tracker.log(step, metrics)
        return entry

    def summarise(self, summary: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.summarise(summary)

    def close(self) -> None:
        """Close the file. Every line was flushed when written, so there is nothing left that could fail to be."""
        with contextlib.suppress(OSError):
            self._file.close()
        close_all(self._trackers)

    def __exit__(self, *_: object) -> None:
        self.close()


_PLAIN = {int, float, bool, type(None)}
LENIENT = json.JSONDecoder(
    parse_constant=lambda _: None,  # NaN and Infinity, which other programs write
    parse_int=lambda digits: int(digits) if len(digits) < 300 else None,  # more digits than a float has
)


def read_metrics(path: Path, brief: bool = False) -> Iterator[dict[str, Any]]:
    """The objects of a metrics file; a last line that was cut off while being written is left out.

    ``brief``: the first one, the last one and those of evaluations only; what is wrong in other lines is not seen.

    A value that is not a number, or not finite, is None: somebody else has written it, and no reader counts with it.
    Raises UserError: another line is not one of metrics, or the file cannot be read.
    """
    try:
        lines = [line for line in lines_of(path, most=2**20) if line.endswith(b"\n")]  # the last may be cut off
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, start=1):
        if brief and 1 < number < len(lines) and b'"eval/accuracy"' not in line:
            continue
        try:
            entry = parse_json(line, LENIENT)
            step = entry["step"]
        except (ValueError, TypeError, KeyError):
            step = None
        if type(step) is not int:
            raise UserError(f"{path}:{number}: not a line of metrics; take the line out to go on")
        if not {type(value) for value in entry.values()} <= _PLAIN:
            entry = {name: v if type(v) in _PLAIN or name == "non_finite" else None for name, v in entry.items()}
        yield entry
