"""What a run starts from: prompts, model, reward and threads, each checked before anything is written.

Every mistake that can be seen here is seen here, with a value that would work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dapo.config import Config
from dapo.config.processors import GENERATION_CONFIG
from dapo.data.source import PromptSource, load_prompts, read_prompts
from dapo.data.tables import Table
from dapo.data.template import PromptTemplate
from dapo.errors import ConfigError, DataError, ModelError, RewardError, first_line
from dapo.model.adapters import find_adapter
from dapo.model.loading import (
    POSITIONS_STATED,
    check_supported,
    context_limit,
    copy_model,
    named_stop_ids,
    read_config,
    with_generation_config,
)
from dapo.process import keep_freed_memory
from dapo.progress import Listener
from dapo.records import Prompt
from dapo.reward.build import needs_answer
from dapo.reward.contract import Scorer
from dapo.rollout.engine import Engine
from dapo.rollout.native.engine import NativeEngine
from dapo.run_folder import RunFolder
from dapo.training.lora import load_trainable, trainable_shape

_SHOWN_DOUBTS = 3
SMALL_MODEL = 10_000_000  # parameters below which an operation is too short to be worth sharing between threads


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a Python caller passes in place of the names in a recipe; None: as the recipe says.

    ``engine``: holds the weights that the run starts from; give ``algorithm.proximal=recompute`` with it.
    ``folder``: a run folder that has been made already; ``lock``: holds its lock, until the run takes that over.
    ``resume``: that of a run to go on with.
    """

    model: Any = None
    tokenizer: Any = None
    rows: Sequence[Mapping[str, Any]] | Table | None = None
    heldout: Sequence[Mapping[str, Any]] | Table | None = None
    reward: Callable[..., Any] | None = None
    engine: Engine | None = None
    folder: RunFolder | None = None
    lock: ExitStack | None = None
    resume: RunFolder | None = None

    @property
    def in_memory(self) -> list[str]:
        """Arguments of ``dapo.train`` that the run folder does not hold."""
        given = {"model": self.model, "tokenizer": self.tokenizer, "prompts": self.rows, "heldout": self.heldout}
        return [name for name, value in (given | {"reward": self.reward}).items() if value is not None]


def policy_model(config: Config, inputs: Inputs, device: torch.device) -> Any:
    """The model to train, on its device; a new adapter is not on it yet.
    Raises ModelError: it cannot be loaded, or not be trained."""
    return load_trainable(inputs.model or config.model.path, config.model, device)


def native_engine(
    config: Config,
    model: Any,
    stop_ids: Sequence[int],
    template: PromptTemplate,
    heldout: Sequence[Prompt],
    spare_bytes: int,
) -> NativeEngine:
    """The engine of this process, with a copy of the model's weights.

    Args:
        heldout: prompts that it has to have room for, beside those to train on.
        spare_bytes: memory to leave to the trainer.

    Raises:
        ModelError: it does not fit into the memory.
    """
    try:
        return NativeEngine(
            copy_model(model, getattr(torch, config.model.compute_dtype)),
            stop_ids,
            max_sequence_tokens=longest_sequence(config, heldout),
            max_concurrent_samples=config.rollout.max_concurrent_samples,
            cache_bytes=cache_bytes(config),
            spare_bytes=spare_bytes,
            deterministic=config.runtime.deterministic,
            threads=torch.get_num_threads(),
            decode=template.decode,
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the rollout engine does not fit into the GPU's memory: {first_line(error)}; lower "
            f"rollout.max_concurrent_samples (now {config.rollout.max_concurrent_samples}) or rollout.cache_gib"
        ) from None


def training_prompts(config: Config, inputs: Inputs, template: PromptTemplate, listener: Listener) -> PromptSource:
    """The prompts to train on, with a word on what was left out.
    Raises DataError: none are named, a row is bad, or there are fewer than one step needs."""
    data = config.data
    rows = data.train if inputs.rows is None else inputs.rows
    if not rows:
        raise DataError(
            "data.train: no files are named; give files of prompts to train on (JSONL, JSON, Parquet) or a data set"
            if inputs.rows is None
            else "prompts: there are none; give rows such as {'prompt': '2+2=', 'answer': '4'}"
        )
    needed = _needs_answer(config, inputs)
    source = load_prompts(data, rows, template, seed=config.seed, answer_required=needed, warn=listener.warning)
    report, wanted = source.report, config.rollout.prompts_per_step
    if report.whole and report.usable < wanted:
        raise DataError(
            f"data.train: {report.usable} usable prompts are fewer than one step needs "
            f"(rollout.prompts_per_step={wanted}); use {_smaller_step(config, report.usable)}, or more data"
        )
    looked_at = f"{report.rows}" if report.whole else f"the first {report.checked} (of {report.rows})"
    for fault in report.faults:
        listener.warning(f"data.train: a bad row is skipped: {fault}")
    for count, what in (
        (report.bad, "rows are bad and skipped"),
        (report.too_long, f"prompts are longer than data.max_prompt_length={data.max_prompt_length} and left out"),
        (report.duplicates, "rows repeat the prompt of an earlier row"),
        (report.conflicts, "rows repeat the prompt of an earlier row with another answer"),
    ):
        if count:
            listener.warning(f"data.train: {count} of {looked_at} {what}")
    for what, places in report.doubts.items():
        listener.warning(f"data.train: {len(places)} of {looked_at} rows {what}, such as {places[0]}")
    if all(prompt.answer is None for prompt in source.untokenized()):
        listener.warning(
            f"data.train: no row has an answer under {data.answer_key!r} (data.answer_key); a reward function is given "
            "answer=None"
        )
    return source


def heldout_prompts(config: Config, inputs: Inputs, template: PromptTemplate, listener: Listener) -> tuple[Prompt, ...]:
    """The rows to evaluate on, all of them and in their order; none if none are named."""
    evaluation = config.evaluation
    rows = evaluation.data if inputs.heldout is None else inputs.heldout
    if not rows:
        return ()
    needed = _needs_answer(config, inputs)

    def warn(text: str) -> None:
        listener.warning(f"evaluation.data: {text}")

    return read_prompts(config.data, rows, template, answer_required=needed, limit=evaluation.rows, warn=warn)


def _needs_answer(config: Config, inputs: Inputs) -> bool:
    check = config.monitor.check
    return (inputs.reward is None and needs_answer(config.reward)) or (check is not None and needs_answer(check))


async def try_reward(
    config: Config, scorer: Scorer, source: PromptSource, heldout: Sequence[Prompt], listener: Listener, inputs: Inputs
) -> None:
    """Score the first prompt's own reference answer and an empty response, and look at what all rows are scored by,
    before there is a run. Of a recipe's reward `dapo doctor` in brief tries more.

    Raises:
        DataError: rows cannot be scored, whatever the response.
        RewardError: the reward function breaks its contract, or says nothing that dynamic sampling could decide by.
    """
    prompts = list(source.untokenized())
    await examine_rows("data.train", prompts, scorer, listener)
    await examine_rows("evaluation.data", heldout, scorer, listener)
    prompt, filters = source.prompts[0], config.algorithm.filter_groups
    compared = filters.enable and filters.metric == "score" and inputs.reward is not None
    texts = list(dict.fromkeys([prompt.answer or "", "", *(p.answer or "" for p in prompts)]))[: 3 if compared else 2]
    tried = [await scorer.score(prompt, text, "stop") for text in texts]
    if tried[0].error is not None:
        listener.warning(f"a trial of the reward, with the reference answer as response, failed: {tried[0].error}")
    known = [reward for reward in tried if reward.error is None]
    if not known and (inputs.reward is not None or config.reward.kind == "function"):
        raise RewardError(f"the reward function fails, on the first reference answer, too: {tried[0].error}")
    if filters.enable and filters.metric == "acc" and None in (reward.correct for reward in known):
        which = "n empty" if known[0].correct is not None else ""
        raise RewardError(
            f"the reward does not say whether a{which} response is correct, which algorithm.filter_groups.metric=acc "
            "decides by; return a bool or dapo.records.Reward(correct=..., value=...), or use "
            "algorithm.filter_groups.metric=score"
        )
    if compared and len(known) == len(tried) > 1 and np.ptp([reward.value for reward in known]) <= filters.tolerance:
        listener.warning(
            "a trial of the reward: the reference answer, an empty response and another row's answer all get "
            f"{known[0].value:g}, and a group whose rewards are all the same is dropped "
            "(algorithm.filter_groups.metric=score); mend the reward"
        )


async def try_check(check: Scorer, source: PromptSource, listener: Listener) -> None:
    """Start the monitor's held-out check, and try it in the same way.
    Raises DataError: rows cannot be scored, whatever the response; RewardError: the check breaks its contract."""
    try:
        await check.start()
        await examine_rows("monitor.check: data.train", list(source.untokenized()), check, listener)
        prompt = source.prompts[0]
        reward = await check.score(prompt, prompt.answer or "", "stop")
    except RewardError as error:
        raise RewardError(f"monitor.check: {error}") from None
    if reward.error is not None:
        listener.warning(f"a trial of monitor.check, with the reference answer as response, failed: {reward.error}")


async def examine_rows(name: str, prompts: Sequence[Prompt], scorer: Scorer, listener: Listener) -> None:
    """Say which rows a reward is in doubt about, such as a reference that cannot be parsed.
    Raises DataError: rows cannot be scored, whatever the response."""
    doubts = await scorer.examine(prompts)
    for unusable in (True, False):
        found = [doubt for doubt in doubts if doubt.unusable is unusable]
        if not found:
            continue
        said = [f"row {prompts[doubt.position].row + 1}: {doubt.text}" for doubt in found[:_SHOWN_DOUBTS]]
        kind = "cannot be scored" if unusable else "are in doubt"
        text = f"{name}: {len(found)} of {len(prompts)} rows {kind}, such as " + "; ".join(said)
        if unusable:
            raise DataError(text)
        listener.warning(text)


def described_model(config: Config, inputs: Inputs) -> Any:
    """What has the config and the generation config of the model to train: of a named one nothing but these.
    Raises ModelError or ConfigError: there is none, or it cannot be trained as the recipe says."""
    if inputs.model is not None:
        return inputs.model
    adapter = find_adapter(config.model.path)
    path = adapter.base if adapter else config.model.path
    found = read_config(path, config.model.trust_remote_code)
    check_supported(found)
    if config.model.lora.rank:
        trainable_shape(config.model, found)
    return with_generation_config(SimpleNamespace(config=found), path)


def check_vocabulary(model: Any, tokenizer: Any, config: Config, listener: Listener, size: int | None = None) -> None:
    """``size``: rows of the model's embedding, where it has none yet. Raises ModelError: the tokenizer's ordinary
    tokens go beyond the model's vocabulary; ConfigError: a stop token is none of the model's."""
    size = size or int(model.get_input_embeddings().weight.shape[0])
    special = set(tokenizer.all_special_ids)
    highest = max((i for i in tokenizer.get_vocab().values() if i not in special), default=0)
    if highest >= size:
        raise ModelError(f"tokenizer: has token ids up to {highest}, but the model's vocabulary has {size} rows")
    named = {**named_stop_ids(model, tokenizer), "rollout.stop_token_ids": config.rollout.stop_token_ids}
    for where, ids in named.items():
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise ConfigError(f"{where}: {wrong[0]} is no token of the model, whose ids are 0..{size - 1}")
    if not any(named.values()):
        listener.warning("neither model nor tokenizer names a stop token: every response will run to its limit")


def notice_generation_config(model: Any, listener: Listener) -> None:
    """Say what a model's generation config asks for and does not get: a change of the logits before sampling."""
    wanted = getattr(model, "generation_config", None)
    values = {name: getattr(wanted, name, None) for name in GENERATION_CONFIG}
    asked = [f"{name} {value}" for name, value in values.items() if value and value != GENERATION_CONFIG[name]]
    if asked:
        listener.warning(
            f"the model's generation_config.json asks for {', '.join(asked)}; not applied, because the "
            "log-probabilities recorded would not be those of the policy"
        )


def longest_response(config: Config) -> int:
    """In tokens, over training and evaluation."""
    return max(config.rollout.max_response_length, config.evaluation.max_response_length or 0)


def _smaller_step(config: Config, prompts: int) -> str:
    """Settings of a step with at most ``prompts`` prompts, which can still be cut into mini-batches."""
    per_update = config.training.groups_per_update
    whole = prompts // per_update * per_update
    if whole:
        return f"rollout.prompts_per_step={whole}"
    return f"rollout.prompts_per_step={prompts} with training.groups_per_update=1"


def longest_sequence(config: Config, heldout: Sequence[Prompt]) -> int:
    """Tokens of prompt and response together, over training and evaluation, whose prompts may be longer."""
    training = config.data.max_prompt_length + longest_response(config)
    return max(training, max((len(p.token_ids) for p in heldout), default=0) + config.evaluated_length)


def check_lengths(config: Config, model_config: Any, heldout: Sequence[Prompt] = ()) -> None:
    """Refuse lengths that the model has no positions for. Raises ConfigError: prompts and responses may be longer than
    the model has positions for; DataError: a held-out prompt and its response are."""
    limit = context_limit(model_config)
    prompt, response = config.data.max_prompt_length, longest_response(config)
    longest = max(heldout, key=lambda p: len(p.token_ids), default=None)
    if limit is not None and longest is not None and len(longest.token_ids) + config.evaluated_length > limit:
        size, room = len(longest.token_ids), limit - len(longest.token_ids)
        advice = f"use evaluation.max_response_length={room} or leave it out" if room > 0 else "leave it out"
        raise DataError(
            f"evaluation.data: row {longest.row + 1}: {size} prompt tokens + {config.evaluated_length} response "
            f"tokens, but the model was made for {limit} positions ({POSITIONS_STATED}), and an evaluation skips no "
            f"row; {advice}"
        )
    if limit is None or prompt + response <= limit:
        return
    prompt_works = max(1, min(prompt, limit // 4))
    works = max(1, limit - prompt_works)
    proposed = {"data.max_prompt_length": prompt_works} if prompt_works < prompt else {}
    if config.rollout.max_response_length > works:
        proposed["rollout.max_response_length"] = works
    if (config.evaluation.max_response_length or 0) > works:
        proposed["evaluation.max_response_length"] = works
    buffer = config.algorithm.overlong_buffer
    if buffer.enable and buffer.len > works:
        proposed["algorithm.overlong_buffer.len"] = works // 5
    raise ConfigError(
        f"data.max_prompt_length: {prompt} prompt tokens + {response} response tokens = {prompt + response}, but "
        f"the model was made for {limit} positions ({POSITIONS_STATED}); use "
        f"{', '.join(f'{k}={v}' for k, v in proposed.items())}"
    )


def device_of(config: Config) -> torch.device:
    """The device of engine and trainer. Raises ConfigError: a GPU was asked for and there is none."""
    found = torch.cuda.is_available()
    if config.runtime.device == "cuda" and not found:
        built = "no GPU was found" if torch.version.cuda else "this PyTorch was built for CPUs only"
        raise ConfigError(f"runtime.device: cuda, but {built} (torch {torch.__version__}); auto or cpu will run here")
    return torch.device("cuda" if found and config.runtime.device != "cpu" else "cpu")


def cache_bytes(config: Config) -> int | None:
    """What the engine may take for keys and values; None: what is free."""
    return None if config.rollout.cache_gib is None else int(config.rollout.cache_gib * 2**30)


@contextmanager
def determinism(config: Config, device: torch.device) -> Iterator[None]:
    """Inside, with ``runtime.deterministic``, a GPU uses only operations whose result has the same bits each time.

    To be entered before the first product on it: its libraries read their setting once, which stays in the environment.
    """
    if not config.runtime.deterministic or device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic  # its stub lacks the setting
    before, filled = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # nothing here reads any
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = filled


def set_threads(config: Config, model: Any) -> None:
    """Threads for tensor work, and memory that is kept for it.

    Operations of a small model take microseconds. Shared between threads, each of them waits for the slowest, and when
    another program holds a core that wait is a whole time slice: measured, a demo model decodes 20k tokens/s on one
    thread whatever else runs, and between 12k and 1.5k on two. See docs/decisions/0004-threads.md.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    torch.set_num_threads(config.runtime.threads or (1 if small else cores))
    keep_freed_memory()
