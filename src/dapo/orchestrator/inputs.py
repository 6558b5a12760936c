"""What a run starts from: prompts, model, reward and threads, each checked before anything is written.

Every mistake that can be seen here is seen here, with a value that would work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dapo.checks.start import longest_sequence, smaller_step
from dapo.config import Config
from dapo.config.user_parts import own_part
from dapo.data.parts import DataInput, Rows, open_parts
from dapo.data.proposer import Proposer
from dapo.data.rows import Table
from dapo.data.source import PromptSource, load_prompts, read_prompts
from dapo.data.template import PromptTemplate
from dapo.environments.player import scores_itself
from dapo.errors import DataError, ModelError, extra, first_line
from dapo.model.loading import (
    check_supported,
    copy_model,
    dtype_on_disk,
    embedding_rows,
    read_config,
    with_generation_config,
)
from dapo.model.placement import apart, cache_bytes, engine_device
from dapo.observe.progress import Listener
from dapo.observe.run_folder import RunFolder
from dapo.observe.tracker import Tracker
from dapo.orchestrator import protocols
from dapo.orchestrator.encoded_state import require_lasting
from dapo.records import Group, Prompt
from dapo.reward.build import needs_answer
from dapo.rollout.engine import Engine
from dapo.rollout.native.engine import NativeEngine
from dapo.rollout.native.exact import exact_temperature
from dapo.training.lora import trainable_shape
from dapo.util.user_code import made

if TYPE_CHECKING:
    from dapo.rollout.openai import OpenAIEngine  # needs an extra


@dataclass(frozen=True, slots=True)
class RunOverrides:
    """What a Python caller passes in place of the names in a recipe; None: as the recipe says.

    ``objective``, ``advantage``, ``source``, ``engine``, ``trackers`` and ``metrics``: what ``algorithm.objective``,
    ``algorithm.advantage.kind``, ``data.source``, ``rollout.engine``, ``run.trackers`` and ``evaluation.metrics`` name.
    The last two come beside those of the recipe. With an engine give ``algorithm.proximal=recompute``.
    ``folder``: a run folder that has been made already; ``lock``: holds its lock, until the run takes that over.
    ``resume``: that of a run to go on with. ``last_checkpoint``: whether one is written at the end.
    """

    model: Any = None
    tokenizer: Any = None
    rows: Sequence[Mapping[str, Any]] | Table | None = None
    heldout: Sequence[Mapping[str, Any]] | Table | None = None
    reward: Callable[..., Any] | None = None
    objective: Callable[..., Any] | None = None
    advantage: Callable[..., Any] | None = None
    source: Callable[[PromptSource], protocols.PromptSource] | None = None
    engine: Callable[..., Engine] | Engine | None = None
    trackers: Sequence[Callable[..., Tracker] | Tracker] = ()
    metrics: Mapping[str, Callable[[Sequence[Group]], float]] | None = None
    folder: RunFolder | None = None
    lock: ExitStack | None = None
    resume: RunFolder | None = None
    last_checkpoint: bool = True

    @property
    def in_memory(self) -> list[str]:
        """What the run folder does not hold of what was passed."""
        given = {"model": self.model, "tokenizer": self.tokenizer, "prompts": self.rows, "heldout": self.heldout}
        given |= self.functions | {"trackers": self.trackers or None, "metrics": self.metrics or None}
        return [name for name, value in given.items() if value is not None]

    @property
    def functions(self) -> dict[str, Any]:
        """Those that stand in for what the recipe names."""
        return {name: getattr(self, name) for name in ("reward", "objective", "advantage", "source", "engine")}


def own_source(config: Config, inputs: RunOverrides, prompts: PromptSource) -> protocols.PromptSource:
    """What is drawn from: the recipe's prompts, or what the user's source makes of them.
    Raises UserError: there is no such source, it lacks some of the protocol, or a checkpoint cannot keep its state."""
    own = own_part(config, "data.source", inputs.source)
    if own is None:
        return prompts
    source: protocols.PromptSource = made("data.source", own, protocols.PromptSource, prompts)
    require_lasting("data.source", source.state())
    return source


def make_engine(
    config: Config,
    inputs: RunOverrides,
    model: Any,
    stop_ids: Sequence[int],
    template: PromptTemplate,
    heldout: Sequence[Prompt],
    spare_bytes: int,
) -> Engine:
    """The user's engine, or that of this process, with a copy of the model's weights on ``rollout.device``.

    Args:
        heldout: prompts that it has to have room for, beside those to train on.
        spare_bytes: memory to leave to the trainer, if they share a device.

    Raises:
        ConfigError: there is no such engine or device, or it lacks something of the protocol.
        ModelError: it does not fit into the memory.
        StartError: vLLM does not start.
    """
    own = own_part(config, "rollout.engine", inputs.engine)
    if own is None and config.rollout.engine == "openai":
        return openai_engine(config, model, stop_ids)
    sizes: dict[str, Any] = {
        "max_sequence_tokens": longest_sequence(config, heldout),
        "max_concurrent_samples": config.rollout.max_concurrent_samples,
        "spare_bytes": 0 if apart(config) else spare_bytes,
    }
    if own is None and config.rollout.engine == "vllm":
        from dapo.rollout.vllm.engine import VLLMEngine

        return VLLMEngine(config, model, stop_ids, decode=template.decode, **sizes)
    if own is not None and not callable(own):  # an engine as it is, with a model of its own
        return made("rollout.engine", own, Engine)  # type: ignore[no-any-return]
    sizes |= {"cache_bytes": cache_bytes(config), "exact_temperature": exact_temperature(config)}
    return _with_copy(config, model, stop_ids, template, own, **sizes)


def evaluation_engine(
    config: Config, model: Any, stop_ids: Sequence[int], template: PromptTemplate, heldout: Sequence[Prompt]
) -> Engine:
    """A second engine on ``rollout.device`` with weights of its own, just large enough to evaluate on ``heldout``
    (``evaluation.while_sampling: copy``). Make it before that of :func:`make_engine`, which takes what memory is left:
    on a GPU this one's cache is ``rollout.cache_gib``, or a quarter of what is free, if it has use for so much.
    Raises ConfigError: there is no such device; ModelError: it does not fit into the memory."""
    device, cache = engine_device(config), cache_bytes(config)
    if cache is None and device.type == "cuda":
        cache = torch.cuda.mem_get_info(device)[0] // 4
    samples = len(heldout) * config.evaluation.samples_per_prompt
    return _with_copy(
        *(config, model, stop_ids, template, None),
        max_sequence_tokens=max(len(p.token_ids) for p in heldout) + config.evaluated_length,
        max_concurrent_samples=min(config.rollout.max_concurrent_samples, samples),
        cache_bytes=cache,
    )


def _with_copy(
    config: Config, model: Any, stop_ids: Sequence[int], template: PromptTemplate, own: Any, **sizes: Any
) -> Engine:
    """What ``own`` makes of a copy of the model on ``rollout.device``; None: the native engine, of these sizes."""
    try:
        twin = copy_model(model, getattr(torch, config.model.compute_dtype), engine_device(config))
        if own is not None:
            twin.set_attn_implementation("sdpa")  # ours works in its own engine and trainer only
            return made("rollout.engine", own, Engine, config, twin, stop_ids, template.decode)  # type: ignore[no-any-return]
        options: dict[str, Any] = {"deterministic": config.runtime.deterministic, "threads": torch.get_num_threads()}
        return NativeEngine(twin, stop_ids, decode=template.decode, **options, **sizes)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the rollout engine does not fit into the GPU's memory: {first_line(error)}; lower "
            f"rollout.max_concurrent_samples (now {config.rollout.max_concurrent_samples}) or rollout.cache_gib"
        ) from None


def openai_engine(config: Config, model: Any, stop_ids: Sequence[int] = (), tokenizer: Any = None) -> OpenAIEngine:
    """That of ``rollout.url``, for a model or the name of one; ``tokenizer``: to evaluate, None: to train.
    Raises UserError: it needs an extra, or its token is not set."""
    with extra("remote", "rollout.engine=openai"):
        from dapo.rollout.openai import OpenAIEngine
    return OpenAIEngine(config, embedding_rows(model, config.model.trust_remote_code), stop_ids, tokenizer)


def training_prompts(
    config: Config, inputs: RunOverrides, template: PromptTemplate, listener: Listener
) -> PromptSource:
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
    how: dict[str, Any] = {"group": config.rollout.samples_per_prompt, "answer_required": needed}
    if data.proposer.url:
        how["beside"] = [_proposer(config, inputs, listener.warning)]
    source = load_prompts(data, rows, template, seed=config.seed, warn=listener.warning, **how)
    report, wanted = source.report, config.rollout.prompts_per_step
    if report.whole and report.usable < wanted:
        raise DataError(
            f"data.train: {report.usable} usable prompts are fewer than one step needs "
            f"(rollout.prompts_per_step={wanted}); use {smaller_step(config, report.usable)}, or more data"
        )
    looked_at = f"{report.rows}" if report.whole else f"the first {report.checked} (of {report.rows})"
    for fault in report.faults:
        listener.warning(f"data.train: bad rows are skipped: {fault}")
    noted = [
        (report.bad, "rows are bad and skipped"),
        (report.too_long, f"prompts are longer than data.max_prompt_length={data.max_prompt_length} and left out"),
    ]
    if not config.environment.on:  # rows of episodes are told apart by other keys, too
        noted += [
            (report.duplicates, "rows repeat the prompt of an earlier row"),
            (report.conflicts, "rows repeat the prompt of an earlier row with another answer"),
        ]
    for count, what in noted:
        if count:
            listener.warning(f"data.train: {count} of {looked_at} {what}")
    for what, places in report.doubts.items():
        listener.warning(f"data.train: {len(places)} of {looked_at} rows {what}, such as {places[0]}")
    if not config.environment.on and all(prompt.answer is None for prompt in source.untokenized()):
        listener.warning(
            f"data.train: no row has an answer under {data.answer_key!r} (data.answer_key); a reward function is given "
            "answer=None"
        )
    return source


def _proposer(config: Config, inputs: RunOverrides, warn: Callable[[str], None]) -> Proposer:
    """That of ``data.proposer``, which keeps clear of all rows that the run has."""

    def texts(rows: DataInput) -> Iterator[str]:
        return (row.text for _, row in Rows(open_parts(config.data, rows, False)[0]).good())

    train, held = inputs.rows or config.data.train, inputs.heldout or config.evaluation.data
    return Proposer(config.data.proposer, texts(train), list(texts(held)) if held else [], warn)


def heldout_prompts(
    config: Config, inputs: RunOverrides, template: PromptTemplate, listener: Listener
) -> tuple[Prompt, ...]:
    """The rows to evaluate on, all of them and in their order; none if none are named."""
    evaluation = config.evaluation
    rows = evaluation.data if inputs.heldout is None else inputs.heldout
    if not rows:
        return ()
    needed = _needs_answer(config, inputs)

    def warn(text: str) -> None:
        listener.warning(f"evaluation.data: {text}")

    return read_prompts(config.data, rows, template, answer_required=needed, limit=evaluation.rows, warn=warn)


def _needs_answer(config: Config, inputs: RunOverrides) -> bool:
    check, own = config.monitor.check, inputs.reward is not None or scores_itself(config)
    return (not own and needs_answer(config.reward)) or (check is not None and needs_answer(check))


def described_model(config: Config, inputs: RunOverrides) -> Any:
    """What has the config and the generation config of the model to train: of a named one nothing but these.
    Raises ModelError or ConfigError: there is none, or it cannot be trained or sampled from as the recipe says."""
    described = inputs.model or _described(config)
    if config.rollout.engine == "vllm" and inputs.engine is None:
        from dapo.rollout.vllm.options import engine_arguments

        engine_arguments(config, described, "", False, 1, 1, 0)  # refused here, before the weights load
    return described


def model_elsewhere(config: Config) -> Any:
    """The model to train that other processes load, on the meta device: names, shapes and settings, without numbers.
    Raises ModelError or ConfigError: as :func:`described_model`."""
    found = _described(config)
    shape = trainable_shape(config.model, found.config)
    shape.generation_config = getattr(found, "generation_config", shape.generation_config)
    shape.source_dtype = found.config.dtype or dtype_on_disk(found.config.name_or_path)
    return shape


def _described(config: Config) -> Any:
    found = read_config(config.model.path, config.model.trust_remote_code)
    check_supported(found)
    if config.model.lora.rank:
        trainable_shape(config.model, found)
    return with_generation_config(SimpleNamespace(config=found), found.name_or_path)
