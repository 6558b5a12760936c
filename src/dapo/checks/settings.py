"""Checks of the recipe alone: what it says, and the folder that it writes to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from dapo.checks.context import CheckContext, Finding
from dapo.checks.memory import GIB, checkpoint_bytes, gib, predict_memory, trained_of
from dapo.checks.start import check_own_parts
from dapo.config import CodeReward, Config, ExactReward, warnings_for
from dapo.config.composed_reward import plain_rewards
from dapo.config.plan import missing_files, plan_line, plan_of
from dapo.config.user_parts import own_part
from dapo.environments.player import check_environment
from dapo.errors import UserError
from dapo.model.placement import device_of, engine_device, take_turns
from dapo.observe.run_folder import RunFolder
from dapo.observe.trackers import check_trackers
from dapo.rollout.engine import in_flight_policy
from dapo.util import memory as system_memory
from dapo.util.terminal import counted

BYTES_PER_TOKEN = 22  # of text 4, of token id, version, log-probs and entropy 18; the rest of a sample's line is small

_MOST_TOKENS_A_SECOND = 10**6  # that a machine samples: an H200 makes a sixth of it with a small model

_LARGEST_PENALTY = {True: 2.0, False: 10.0}
"""What a response may lose by its length, for rewards from -1 to +1, whose range that is, and for others."""


def check_settings(context: CheckContext) -> Iterator[Finding]:
    config = context.config
    found = [(text, "") for text in warnings_for(config)] + list(_doubtful(config))
    for text, fix in found:
        yield Finding("recipe", "settings", "warn", text, fix)
    for name, check in (
        ("trackers", check_trackers),
        ("own-parts", check_own_parts),
        ("environment", check_environment),
    ):
        try:
            check(config)
        except UserError as error:
            yield Finding("recipe", name, "fail", str(error))
    if not found:
        yield Finding("recipe", "settings", "pass", plan_line(plan_of(config)))


def _doubtful(config: Config) -> Iterator[tuple[str, str]]:
    yield from _doubtful_schedule(config)
    yield from _doubtful_sampling(config)
    yield from _doubtful_reward(config)
    if config.data.shuffle_answers:
        text = "data.shuffle_answers=true: the answers are permuted over the rows, so that nothing can be learned"
        yield text, "data.shuffle_answers=false, unless this is the control experiment"
    if config.model.trust_remote_code:
        yield "model.trust_remote_code=true: Python code that comes with the model runs with your rights", ""


def _doubtful_schedule(config: Config) -> Iterator[tuple[str, str]]:
    training = config.training
    if not training.steps:
        yield "training.steps=0: nothing is trained", "training.steps=100"
        return
    rate, usual = training.learning_rate, "what is usual (1e-6 for a large model, 1e-4 for a tiny one)"
    if rate > 1e-3 or rate <= 1e-8:
        side = f"above {usual}" if rate > 1e-3 else f"below {usual}: an update is no more than the rounding of a weight"
        yield f"training.learning_rate={rate:g} is far {side}", "training.learning_rate=1.0e-6"


def _doubtful_sampling(config: Config) -> Iterator[tuple[str, str]]:
    rollout, algorithm, evaluation = config.rollout, config.algorithm, config.evaluation
    if not 0.5 <= rollout.temperature <= 1.5:
        yield f"rollout.temperature={rollout.temperature:g} is unusual for rollouts", "rollout.temperature=1.0"
    if evaluation.data and evaluation.samples_per_prompt > 1 and evaluation.temperature == 0:
        text = f"evaluation.temperature=0 with samples_per_prompt={evaluation.samples_per_prompt}: all samples of a "
        text += "prompt are alike"
        yield text, "evaluation.temperature=1.0"
    if rollout.samples_per_prompt < 4:
        yield (
            f"rollout.samples_per_prompt={rollout.samples_per_prompt}: a response is compared with "
            f"{rollout.samples_per_prompt - 1} other{'s' * (rollout.samples_per_prompt > 2)}, so that advantages are "
            "mostly chance, and few groups hold right and wrong ones",
            "rollout.samples_per_prompt=8, or the paper's 16",
        )
    buffer = algorithm.overlong_buffer
    plus_minus_one = config.reward.kind in ("math", "exact", "code")
    if buffer.enable and buffer.penalty_factor > _LARGEST_PENALTY[plus_minus_one]:
        why = "it outweighs rewards of ordinary size"
        if plus_minus_one:
            why = "with rewards from -1 to +1 a long response that is right gets less than a short one that is wrong"
        text = f"algorithm.overlong_buffer.penalty_factor={buffer.penalty_factor:g}: {why}"
        yield text, "algorithm.overlong_buffer.penalty_factor=1.0"
    if algorithm.filter_groups.enable and algorithm.filter_groups.max_num_gen_batches == 1:
        text = "algorithm.filter_groups.max_num_gen_batches=1: a single group that is filtered out starves the step"
        yield text, "algorithm.filter_groups.max_num_gen_batches=10"


def _doubtful_reward(config: Config) -> Iterator[tuple[str, str]]:
    for reward in plain_rewards(config.reward):
        if reward.on_error == "value" and reward.error_value > 0:
            told = f"reward.error_value={reward.error_value:g}: a score that failed is rewarded"
            yield told, "reward.error_value=-1.0, or reward.on_error=drop"
        if reward.max_error_rate == 1:
            yield "reward.max_error_rate=1: the run goes on even if every score fails", "reward.max_error_rate=0.2"
        after = reward.after if isinstance(reward, ExactReward) else None
        if after and any(text in after for text in config.rollout.stop):
            told = f"rollout.stop ends a response at reward.after={after!r}, before there is an answer"
            yield told, "rollout.stop=[]"
        if isinstance(reward, CodeReward) and reward.sandbox == "none":
            told = "reward.sandbox=none: programs that the model writes run with your rights"
            yield told, "reward.sandbox=bubblewrap"
    if config.monitor.check is not None and config.monitor.check == config.reward:
        told = "monitor.check is the reward itself, so it can never disagree with it"
        yield told, "monitor.check={kind: math}, or another verifier; or leave it out"


def check_files(context: CheckContext) -> Iterator[Finding]:
    config = context.config
    missing = missing_files(config)
    if not config.data.train:
        yield Finding("data", "files", "fail", "data.train: no files to train on are named", "data.train=FILE.jsonl")
    for text in missing:
        if context.demo:
            yield Finding("data", "files", "skip", f"{text}; made by `{context.demo}`")
        else:
            fix = "mend the name; paths count from the recipe or from here"
            yield Finding("data", "files", "fail", text, f"{context.remedy}; or {fix}" if context.remedy else fix)
    if config.data.train and not missing:
        context.files = True
        count = len(config.data.train) + len(config.evaluation.data)
        yield Finding("data", "files", "pass", f"{count} named, all there")


def check_ahead(context: CheckContext) -> Iterator[Finding]:
    """With ``max_staleness``: whether sampling and updates will run side by side, and what corrects older samples."""
    config, bound = context.config, context.config.rollout.max_staleness
    if not bound:
        return
    context.need(context.device, "device")
    text, fix = ahead_told(config)
    yield Finding("recipe", "ahead", "warn" if fix else "pass", text, fix)
    if config.algorithm.correction.kind == "none" and config.proximal != "engine":
        text = f"tokens up to {counted(bound, 'version')} old count as if the proximal policy had sampled them"
        yield Finding("recipe", "correction", "warn", text, "algorithm.correction.kind=truncate (docs/async.md)")


def ahead_told(config: Config) -> tuple[str, str]:
    """How sampling goes on during updates and what that may save, and what would do better (empty: nothing).
    Raises ConfigError: a device is not here."""
    learner, engine, kind = device_of(config), engine_device(config), config.rollout.engine
    in_flight = f"in_flight={in_flight_policy(config, own_part(config, 'rollout.engine'))}"
    depth = f"up to {counted(config.ahead, 'step')} ahead (rollout.{in_flight})"
    if not config.ahead:
        late = "late samples go on beside the updates, or after them on one GPU; groups left over are carried on"
        return f"no prompt is drawn for later steps (rollout.ahead=0, {in_flight}); {late}", ""
    if take_turns(config):
        text = f"{depth}, but sampling and updates take turns on {learner}: only the wait for late samples is saved"
        return text, "rollout.device=cuda:1 if there is another GPU, or rollout.max_staleness=0"
    if kind == "native" and learner == engine:
        each = "side by side each is slower, and a step may take longer than by turns"
        return f"{depth}, on the CPU that the updates use: {each}", "compare time/step with rollout.max_staleness=0"
    here = f"the engine is on {engine}"
    known = {"native": here, "vllm": here, "openai": "the server at rollout.url samples"}
    gain = "at most the shorter of sampling and updates is saved: time/rollout and time/update of a run without it tell"
    where = known.get(kind, "where your engine samples is not known")
    return f"{depth}, beside updates on {learner}; {where}; {gain}", ""


# --- the run folder -----------------------------------------------------------------------------------------------


def check_run_folder(context: CheckContext) -> Iterator[Finding]:
    folder = Path(context.config.run.dir or "runs/run")
    text, fix = f"{folder} can be written", ""
    try:
        RunFolder.require_free(context.config)
    except UserError as error:
        text, _, fix = str(error).removeprefix("run.dir: ").partition("; ")
    yield Finding("machine", "run-folder", "fail" if fix else "pass", text, fix)


def check_disk(context: CheckContext) -> Iterator[Finding]:
    """Whether checkpoints and samples fit into the file system of the run folder.

    Checkpoints: float32 weights and Adam's two moments of what is trained, as many as are kept
    (``run.keep_last``, the best one, and the one being written before an old one goes), and weights before and after
    training at 4. Samples: at most 4 bytes of text for each token that can be drawn."""
    config, shape = context.config, context.need(context.shape, "model")
    trained = trained_of(shape)
    folder = Path(config.run.dir or "runs/run")
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir())).free
    kept, one, samples = checkpoints_kept(config), checkpoint_bytes(config, shape), _samples_bytes(config)
    needed = kept * one + 2 * 4 * trained
    text = f"{kept} checkpoints of {gib(one)} and weights before and after take {gib(needed)}, {gib(free)} are free"
    if needed > free:
        fits = max(1, (free - 2 * 4 * trained) // one - 2)
        fix = f"run.keep_last={fits} run.keep_best=false" if kept - 2 > fits and free > 4 * one else "free some"
        yield Finding("machine", "disk", "fail", text, f"{fix}, or run.dir=FOLDER on a larger disk")
    elif needed + samples > free:
        fix = "run.save_samples=0.1 (a share) or false, or run.dir=FOLDER on a larger disk"
        yield Finding("machine", "disk", "warn", f"{text}; samples may take up to {gib(samples)} more", fix)
    else:
        also = f"; samples at most {gib(samples)}" if samples > GIB else ""
        yield Finding("machine", "disk", "pass", text + also)


def check_snapshot(context: CheckContext) -> Iterator[Finding]:
    """Whether there is main memory for the copy of a checkpoint's state, which is written while the training goes on.
    Nothing is said where the run itself does not fit, which has been told."""
    shape, config = context.need(context.shape, "model"), context.config
    if config.runtime.kind == "ray":
        return
    on_gpu = context.need(context.device, "device").type == "cuda"
    snapshot = checkpoint_bytes(config, shape)
    run, free = predict_memory(config, shape, on_gpu), system_memory.free_memory()
    needed = snapshot + run.host
    if not on_gpu:
        context.need(context.fits, "memory")
        needed += run.total(on_gpu=False)
        if free is not None and context.model is not None:
            free += run.weights + run.reward_model  # they are loaded already
    text = f"a checkpoint takes {gib(snapshot)} of RAM while it is written"
    text += "" if needed == snapshot else f", {gib(needed)} with what the run itself holds there"
    if free is None:
        yield Finding("machine", "snapshot", "pass", f"{text}; how much RAM is free cannot be told here")
        return
    fits = needed <= free
    fix = "" if fits else f"a machine with {gib(1.2 * (needed - free))} more of RAM, or a smaller model"
    yield Finding("machine", "snapshot", "pass" if fits else "fail", f"{text}; {gib(free)} are free", fix)


def checkpoints_kept(config: Config) -> int:
    """At the most, the one that is being written counted."""
    run, steps = config.run, config.training.steps
    every = steps // run.save_every if run.save_every else 1
    kept = every if run.keep_last is None else min(run.keep_last, max(1, every))
    kept += steps // run.keep_every if run.keep_every else 0
    return kept + 1 + (run.keep_best and bool(config.evaluation.data))


def _samples_bytes(config: Config) -> int:
    if not config.run.save_samples:
        return 0
    plan = plan_of(config)
    drawn = int(plan["prompts drawn per step, at most"]) * config.rollout.samples_per_prompt
    longest = int(plan["tokens per sample, at most"])
    tokens: float = drawn * config.training.steps * longest
    if config.training.samples is not None:
        tokens = min(tokens, config.training.samples * longest)
    if config.training.minutes is not None:
        tokens = min(tokens, 60 * config.training.minutes * _MOST_TOKENS_A_SECOND)
    if config.training.tokens is not None:
        tokens = min(tokens, 2 * config.training.tokens)  # and prompts
    return int(float(config.run.save_samples) * tokens * BYTES_PER_TOKEN)
