"""What ``dapo evaluate`` and ``dapo generate`` share: a model by any of its names, settings in layers, and an engine.

The first part is light, so that mistakes in names and settings show at once; torch is loaded by the second one. No
trainer and no float32 master weights are made: the model is loaded in ``model.compute_dtype``."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import Config, nested
from dapo.config.data import DataItem
from dapo.config.one_value import require_one_value
from dapo.config.reading import apply_overrides, flat, layered_config, with_values
from dapo.config.secrets import require_secrets
from dapo.errors import ConfigError, DataError, ModelError
from dapo.evaluation.evaluate import stop_texts
from dapo.inference.found_model import FROM_RECIPE, OF_VLLM, FoundModel, find_model, said_in, without_effect
from dapo.observe.progress import Listener
from dapo.util.terminal import visible

if TYPE_CHECKING:
    from dapo.data.template import PromptTemplate
    from dapo.records import Prompt
    from dapo.rollout.native.engine import NativeEngine
    from dapo.rollout.openai import OpenAIEngine
    from dapo.rollout.process import ProcessEngine
    from dapo.rollout.vllm.engine import VLLMEngine

    LocalEngine = NativeEngine | VLLMEngine | ProcessEngine


_OPEN: Mapping[str, Any] = {
    "rollout": {"max_response_length": 1024},
    # what concerns training alone must not stand in the way
    "algorithm": {"overlong_buffer": {"enable": False}, "filter_groups": {"enable": False}},
    "training": {"tokens_per_micro_batch": 2**40},
}
"""Where nobody says otherwise."""
ONE_EACH: Mapping[str, Any] = {"evaluation": {"samples_per_prompt": 1, "data": [], "rows": None}}
"""For prompts to answer: what a recipe says of its evaluation is not about them, and its reward is not asked."""


def inference_config(
    model: FoundModel,
    *layers: Mapping[str, Any],
    recipe: Path | None = None,
    overrides: Sequence[str] = (),
    where: Mapping[str, str] | None = None,
    unused: Sequence[str] = (),
) -> Config:
    """Settings for a model: defaults, then ``recipe`` or else the one it was trained by, then ``layers`` of nested
    settings, such as a benchmark's and those of options, then ``overrides``. ``where``: places of keys for messages.
    ``unused``: keys, or beginnings of keys, that the caller makes nothing of.
    Raises ConfigError: with every problem found; a key of ``layers`` or ``overrides`` has no effect."""
    trained = recipe or model.recipe
    from_recipe = said_in(trained) if trained else {}
    rollout = from_recipe.get("rollout", {})
    last: dict[str, Any] = {}
    apply_overrides(last, overrides, {})
    asked = [dict(flat(layer)).get("rollout.engine") for layer in (*layers, last)]
    if next(filter(None, reversed(asked)), rollout.get("engine")) != "vllm":  # no other samples here as it did there
        rollout = {key: value for key, value in rollout.items() if key not in OF_VLLM}
    trees = [_OPEN, from_recipe | {"rollout": rollout}, *layers, {"model": {"path": model.path}}]
    config = layered_config(trees, overrides, where)
    if ONE_EACH in layers:
        unused = (*unused, "reward", "evaluation.metrics", *["evaluation.rows"] * (not config.evaluation.data))
    asked_for = (layer for layer in (*layers, last) if layer is not ONE_EACH)
    if ignored := without_effect(*asked_for, unused=unused):
        raise ConfigError("\n".join(ignored))
    require_secrets(config.model_dump(mode="json", include=FROM_RECIPE), trained, "as section.key=value")
    return config


_OPTIONS = {
    "samples": "evaluation.samples_per_prompt",
    "max_tokens": "evaluation.max_response_length",
    "seed": "seed",
    "system": "data.system",
    "template": "data.template",
    "server": "rollout.url",
    "environment": "environment.name",
}
"""Keys of the config that options of commands, and arguments of Python's functions, stand for; all others are keys of
``evaluation`` by their own names."""


def settings_for(
    model: Any,
    options: Mapping[str, Any],
    *layers: Mapping[str, Any],
    recipe: Path | None = None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    unused: Sequence[str] = (),
) -> tuple[FoundModel, Config]:
    """A model by name, or a loaded one, and the settings for it: ``layers``, over them ``options`` by the names that
    messages tell (``--top-p`` or ``top_p``; None or []: not given) and ``settings``, a tree, and all else as for
    :func:`inference_config`.
    Raises UserError: there is no such model, or a setting is wrong, or differs from an option for the same key."""
    from dapo.model.hub import require_at_hand

    by_name = isinstance(model, str | Path)
    found = find_model(str(model)) if by_name else FoundModel(type(model).__name__)
    if by_name:
        require_at_hand("model", found.path)
    given: dict[str, Any] = {}
    where: dict[str, str] = {}
    for option, value in options.items():
        if value not in (None, []):
            name = option.lstrip("-").replace("-", "_")
            key = _OPTIONS.get(name, f"evaluation.{name}")
            given[key], where[key] = value, option
    require_one_value({key: (where[key], value) for key, value in given.items()}, overrides, settings)
    if "rollout.url" in given:
        given["rollout.engine"] = "openai"
    layers = (*layers, nested(given), settings or {})
    return found, inference_config(found, *layers, recipe=recipe, overrides=overrides, where=where, unused=unused)


def loaded_model(model: Any, tokenizer: Any, settings: Mapping[str, Any]) -> Any:
    """``model`` if it is loaded, None if it is a name.
    Raises ModelError: it is neither, has no weights, or comes without its tokenizer."""
    if isinstance(model, str | Path):
        return None
    if not hasattr(model, "config") or not hasattr(model, "parameters"):
        raise ModelError(f"model: expected a folder, a name or a loaded PreTrainedModel, got {type(model).__name__}")
    if any(weights.is_meta for weights in model.parameters()):
        raise ModelError("model: its weights are on the meta device, so there are none; load them first")
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise ModelError(
            f"tokenizer: expected a loaded one, got {type(tokenizer).__name__} {str(tokenizer)[:60]!r}; the name of "
            "one goes into the setting model.tokenizer"
        )
    if tokenizer is None and "model.tokenizer" not in settings:
        raise ModelError("tokenizer: a loaded model needs its own: give tokenizer=... or the setting model.tokenizer")
    return model


def function_of(model: FoundModel) -> str | None:
    """What to say where a model comes from a run whose reward was a Python function: its recipe does not have it."""
    from dapo.observe.run_view import RunView

    function = RunView.read(model.recipe.parent, brief=True).reward_from_python if model.recipe else None
    return function and f"the run was trained on the Python function {function}, which its folder does not hold"


def label_of(item: DataItem) -> str:
    """What people call an item of data: its path, and what it takes to tell it from others of this path."""
    return ":".join(part for part in (item.path, item.name, item.split) if part)


def settings_lines(config: Config) -> list[str]:
    """How prompts are made, answers judged and samples drawn, for people: evaluation has its own sampling settings."""
    data, reward, sampling = config.data, config.reward, config.evaluation
    written = {name: getattr(data, name) for name in ("instruction", "system", "chat_template_kwargs")}
    prompt = f"template {data.template}" + "".join(f", {name} {text!r}" for name, text in written.items() if text)
    judged = {key: value for key, value in reward.model_dump(include={"extract", "after", "function"}).items() if value}
    said = "".join(f", {key} {', '.join(v) if isinstance(v, list) else repr(v)}" for key, v in judged.items())
    drawn = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    drawn += f", top_p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    drawn += f", top_k {sampling.top_k}" if sampling.top_k else ""
    drawn += f", min_p {sampling.min_p:g}" if sampling.min_p else ""
    stop, in_4_bits = stop_texts(config), ", the base of an adapter in 4 bits" * (config.model.lora.base == "nf4")
    drawn += f", until {' or '.join(map(repr, stop))}" if stop else ""
    return [
        f"model {config.model.path} in {config.model.compute_dtype}{in_4_bits}",
        f"prompts: {prompt}",
        f"reward: {reward.kind}{said}",
        f"sampling: {sampling.samples_per_prompt} per prompt, {drawn}, at most {config.evaluated_length} tokens, "
        f"seed {config.seed}",
    ]


@dataclass(frozen=True, slots=True)
class Prompting:
    """A tokenizer, the template it makes prompts with, and the config with that template in it. ``model``: one that is
    loaded already; None: that of the config."""

    config: Config
    tokenizer: Any
    template: PromptTemplate
    model: Any = None


def with_template(config: Config, tokenizer: Any) -> Config:
    """``config``; where it names no template with ``chat`` if the tokenizer has one, else ``plain``."""
    if "template" in config.data.model_fields_set:
        return config
    template = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    return with_values(config, {"data.template": template})


def load_prompting(config: Config, model: Any = None, tokenizer: Any = None) -> Prompting:
    """Load the tokenizer, unless it is given, and choose the template (:func:`with_template`). ``model``: a loaded one
    to use in place of the config's.
    Raises ModelError: there is no such tokenizer; ConfigError: a template was asked for that it does not have."""
    from dapo.data.template import PromptTemplate
    from dapo.model.loading import embedding_rows, load_tokenizer

    trusted = config.model.trust_remote_code
    tokenizer = tokenizer or load_tokenizer(config.model.tokenizer or config.model.path, trusted)
    config = with_template(config, tokenizer)
    rows = embedding_rows(model or config.model.path, trusted)
    return Prompting(config, tokenizer, PromptTemplate(config.data, tokenizer, rows), model)


def doubts(prompting: Prompting, prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    """What to warn of: tools the model is not shown, settings a server is not told, samples that will all be the same,
    letters the tokenizer has no token for. ``prompts``: by where they come from; of many, some are looked at."""
    from dapo.checks.answers import LOOKED_AT, spread
    from dapo.data.template import lost_letters
    from dapo.environments.player import SHOW_TOOLS, hidden_tools

    first = next((some[0] for some in prompts.values() if some), None)
    if first and (hidden := hidden_tools(prompting.config, prompting.template, first)):
        yield f"{hidden}; {SHOW_TOOLS}"
    asked, sent = prompting.config.evaluation, json.dumps(prompting.config.rollout.request)
    if sent != "null":
        off = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, value in ((name, getattr(asked, name)) for name in off):
            if value != off[name] and f"${name}" not in sent:
                yield f"rollout.request sends no ${name}: the server samples as it is set, not with {name} {value:g}"
        if asked.samples_per_prompt > 1 and "$seed" not in sent:
            yield "rollout.request sends no $seed: the samples of a prompt may be alike, and others the next time"
    if asked.samples_per_prompt > 1 and asked.temperature == 0:
        yield "at temperature 0 all samples of a prompt are alike; use a temperature of 1"
    for name, several in prompts.items():
        some, decode = spread(several, LOOKED_AT), prompting.tokenizer.decode
        lost = [(p, letters) for p in some if (letters := lost_letters(p.text, decode(list(p.token_ids))))]
        if lost:
            prompt, letters = lost[0]
            which = f", {len(lost)} of {len(some)} looked at" if len(several) > 1 else ""
            yield visible(
                f"{name}, row {prompt.row + 1}{which}: the tokenizer has no token for {''.join(letters)!r}: the model "
                "does not see these letters and answers another prompt"
            )


def load_engine(
    prompting: Prompting, prompts: Mapping[str, Sequence[Prompt]], samples: int, listener: Listener
) -> LocalEngine:
    """The model in an engine that is just large enough for ``prompts``, by the name of where they come from, and for
    ``samples`` at once.
    Raises ModelError: not found, damaged or not supported; DataError: a prompt and its response do not fit into the
    model's positions; names the row."""
    model, stop_ids = load_weights(prompting, listener)
    limit = prompting.config.evaluated_length
    check_positions(prompts, limit, model.config)
    longest = max(len(p.token_ids) for several in prompts.values() for p in several)
    if prompting.config.environment.on:
        from dapo.checks.start import check_lengths

        check_lengths(prompting.config, model.config)
        longest = max(longest, prompting.config.data.max_prompt_length)  # tools are a part of it
    return engine_for(prompting, model, stop_ids, longest + limit, samples)


def load_weights(prompting: Prompting, listener: Listener) -> tuple[Any, tuple[int, ...]]:
    """The model on its device, frozen, and the ids that end a response, of which the template is told. For vLLM, which
    reads weights itself, it is on the meta device.
    Raises ModelError: not found, damaged or not supported."""
    import torch

    from dapo.checks.start import check_vocabulary, notice_generation_config
    from dapo.model.adapters import has_adapter
    from dapo.model.loading import load_model, stop_token_ids
    from dapo.model.nf4 import in_4_bits, narrow_base
    from dapo.model.placement import engine_device, set_threads

    config = prompting.config
    dtype = getattr(torch, config.model.compute_dtype)
    device = engine_device(config)
    if device.type == "cuda":
        listener.phase(f"on {torch.cuda.get_device_name(device)}")
    if config.rollout.engine == "vllm":
        model = _outline(config)
    else:
        # a loaded model stays as it is: load_model changes the types of its numbers and its attention
        source = config.model.path if prompting.model is None else copy.deepcopy(prompting.model)
        model = load_model(source, dtype, config.model.trust_remote_code, device)
        if config.model.lora.base == "nf4" and has_adapter(model):
            listener.phase(in_4_bits(narrow_base(model)))
        elif config.model.lora.base == "nf4":
            listener.warning(
                "model.lora.base=nf4: is for the base of an adapter, and the model has none: it stays wide"
            )
        model.requires_grad_(False)
        set_threads(config, model)
    stop_ids = stop_token_ids(model, prompting.tokenizer, config.rollout.stop_token_ids)
    prompting.template.ends_with(stop_ids)
    check_vocabulary(model, prompting.tokenizer, config, listener)
    notice_generation_config(model, listener)
    return model, stop_ids


def _outline(config: Config) -> Any:
    """The model without its numbers, and with the generation config beside them.
    Raises ModelError: not found, or no causal language model."""
    from dapo.model.loading import read_config, with_generation_config
    from dapo.training.lora import trainable_shape

    shape = trainable_shape(config.model, read_config(config.model.path, config.model.trust_remote_code))
    return with_generation_config(shape, config.model.path)


def engine_for(
    prompting: Prompting,
    model: Any,
    stop_ids: Sequence[int],
    sequence_tokens: int,
    samples: int,
    adapter: str | None = None,
) -> LocalEngine:
    """``model`` in an engine for ``samples`` at once, each with its prompt of at most ``sequence_tokens`` tokens.
    ``adapter``: folder of the one that is on it; None: that is ``model.path``, if there is one.
    Raises UserError: vLLM is missing, does not cover the model, or does not start."""
    import torch

    from dapo.model.adapters import find_adapter
    from dapo.model.placement import cache_bytes
    from dapo.rollout.native.engine import NativeEngine

    config = prompting.config
    sizes: dict[str, Any] = {
        "max_sequence_tokens": sequence_tokens,
        "max_concurrent_samples": min(config.rollout.max_concurrent_samples, max(samples, 1)),
        "decode": prompting.template.decode,
    }
    if config.rollout.engine == "vllm":
        from dapo.rollout.vllm.engine import VLLMEngine

        found = find_adapter(adapter or config.model.path)
        return VLLMEngine(config, model, stop_ids, loaded=True, adapter=found.folder if found else None, **sizes)
    options: dict[str, Any] = {"deterministic": config.runtime.deterministic, "threads": torch.get_num_threads()}
    return NativeEngine(model, stop_ids, cache_bytes=cache_bytes(config), **options, **sizes)


def remote_engine(prompting: Prompting, prompts: Mapping[str, Sequence[Prompt]]) -> OpenAIEngine:
    """That of a server, which has the weights: of the model only what is beside them is read.
    Raises UserError: as :func:`load_engine`, or an extra or the server's token is missing."""
    from dapo.model.loading import stop_token_ids
    from dapo.orchestrator.inputs import RunOverrides, described_model, openai_engine

    config, tokenizer = prompting.config, prompting.tokenizer
    model = described_model(config, RunOverrides(prompting.model))
    check_positions(prompts, config.evaluated_length, model.config)
    stop_ids = stop_token_ids(model, tokenizer, config.rollout.stop_token_ids)
    prompting.template.ends_with(stop_ids)
    return openai_engine(config, prompting.model or config.model.path, stop_ids, tokenizer)


def room_for(config: Config) -> tuple[int, int]:
    """The longest prompt and the longest response, in tokens, that a model takes where the prompts are not known yet:
    as the settings say, and together no more than its positions.
    Raises ModelError: its config cannot be read; ConfigError: no response of that length fits, whatever the prompt."""
    from dapo.model.loading import POSITIONS_STATED, context_limit, read_config

    shape = read_config(config.model.path, config.model.trust_remote_code)
    positions, limit = context_limit(shape) or 2**20, config.evaluated_length
    if limit >= positions:
        text = f"{limit} response tokens and a prompt are more than the {positions} positions that the model has"
        raise ConfigError(f"{text} ({POSITIONS_STATED}); use evaluation.max_response_length={positions // 2}")
    return min(config.data.max_prompt_length, positions - limit), limit


def check_positions(prompts: Mapping[str, Sequence[Prompt]], limit: int, model_config: Any) -> None:
    """Raises DataError: the longest prompt and its response do not fit into the model's positions; ConfigError: no
    response of that length does, whatever the prompt."""
    from dapo.model.loading import POSITIONS_STATED, context_limit

    positions = context_limit(model_config)
    every = [(p, name) for name, several in prompts.items() for p in several]
    longest, name = max(every, key=lambda found: len(found[0].token_ids))
    size = len(longest.token_ids)
    if positions is None or size + limit <= positions:
        return
    row = f"{name}, row {longest.row + 1}"
    if size >= positions:
        text = f"{row}: the prompt has {size} tokens, but the model was made for {positions} positions"
        raise DataError(f"{text} ({POSITIONS_STATED}); leave this row out")
    raise (ConfigError if limit >= positions else DataError)(
        f"{row}: {size} prompt tokens and up to {limit} response tokens are more than the {positions} positions that "
        f"the model was made for ({POSITIONS_STATED}); use --max-tokens {positions - size} or less (in Python: "
        "max_tokens)"
    )
