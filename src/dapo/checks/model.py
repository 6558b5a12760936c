"""Checks of model and tokenizer: that they can be loaded, and that they belong together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dapo.checks.context import CheckContext, Finding, area_of, on_this_machine
from dapo.checks.start import check_lengths, check_vocabulary, longest_sequence, notice_generation_config
from dapo.config.reading import with_values
from dapo.config.stages import StageConfig
from dapo.data.template import PromptTemplate
from dapo.environments.player import SHOW_TOOLS, hidden_tools
from dapo.errors import ConfigError, DataError, ModelError, UserError, extra, first_line
from dapo.model import loading
from dapo.model.adapters import CONFIG_FILE, adapter_parameters, find_adapter
from dapo.model.hub import hub_answers, is_name, require_at_hand
from dapo.model.nf4 import in_4_bits
from dapo.model.placement import device_of, engine_device, set_threads
from dapo.observe.progress import QuietListener
from dapo.training.lora import begin_adapter, load_trainable, shape_of


def _warning(name: str, found: str, fix: str) -> Finding:
    return Finding("model", name, "warn", found, fix)


def check_device(context: CheckContext) -> Iterator[Finding]:
    config: Any = context.config
    try:
        learner = device_of(config)
        engine = learner if isinstance(config, StageConfig) else engine_device(config)
    except ConfigError as error:
        fix = "rollout.device=null" if str(error).startswith("rollout") else "runtime.device=auto"
        yield Finding("recipe", "device", "fail", str(error), fix)
        return
    context.device = learner
    if config.runtime.kind == "ray":
        return  # the cluster says
    text = f"training runs on {learner}" + f", the engine on {engine}" * (engine != learner)
    yield Finding("machine", "device", "pass", text)


def check_tokenizer(context: CheckContext) -> Iterator[Finding]:
    config = context.config
    name = config.model.tokenizer or config.model.path
    absent = _absent(context, "tokenizer", name, "tokenizer_config.json")
    if absent:
        if absent.status == "skip" or config.model.tokenizer is not None:  # else the model's own line says it
            yield absent
        return
    try:
        context.tokenizer = loading.load_tokenizer(name, config.model.trust_remote_code)
    except ModelError as error:
        if config.model.tokenizer is not None or Path(name).is_dir():  # else the model's own line says it
            yield Finding("model", "tokenizer", "fail", str(error), "model.tokenizer=FOLDER, or a name on the hub")
        return
    try:
        context.template = PromptTemplate(config.data, context.tokenizer)
    except ConfigError as error:
        text, _, fix = str(error).partition("; use ")
        yield Finding("recipe", "chat-template", "fail", text, fix or "data.chat_template=FILE that can be used")
        return
    has = "with" if getattr(context.tokenizer, "chat_template", None) else "without"
    text = f"{len(context.tokenizer):,} tokens, {has} a chat template; data.template={config.data.template}"
    yield Finding("model", "tokenizer", "pass", text)


def check_architecture(context: CheckContext) -> Iterator[Finding]:
    """Whether the architecture is one that is computed right here. Reads config.json, and no weights."""
    config = context.config
    name = config.model.path
    absent = _absent(context, "model", name, "config.json")
    if absent:
        yield absent
        return
    fix = "model.path=FOLDER in Hugging Face layout, or a name on the hub"
    if not Path(name).expanduser().exists() and not is_name(name):
        yield Finding("model", "model", "fail", f"model.path: {name}: no such folder", fix)
        return
    try:
        adapter = find_adapter(name)
        name = name if adapter is None else adapter.base
        absent = _absent(context, "model", name, "config.json")
        if absent:
            if adapter is not None and hub_answers():
                require_at_hand(f"adapter {adapter.folder}: base_model_name_or_path in {CONFIG_FILE}:", name)
            yield absent
            return
        found = loading.read_config(name, config.model.trust_remote_code)
    except ModelError as error:
        yield Finding("model", "model", "fail", f"model.path: {first_line(error)}", fix)
        return
    try:
        loading.check_supported(found)
    except ModelError as error:
        yield Finding("model", "architecture", "fail", str(error), "a model that docs/models.md names")
        return
    try:
        context.shape = shape_of(config, found)
    except (ModelError, ConfigError) as error:
        yield Finding("model", "adapter", "fail", str(error), "see docs/models.md, LoRA adapters")
        return
    context.model_config = found
    trained = sum(p.numel() for p in adapter_parameters(context.shape).values())
    of_it = f", {trained:,} of them in a LoRA adapter" if trained else ""
    of_it += f"; {in_4_bits(context.shape)}" if config.model.lora.base == "nf4" else ""
    text = f"{found.model_type}, {context.shape.num_parameters():,} parameters{of_it}"
    yield Finding("model", "architecture", "pass", text)


def check_engine(context: CheckContext) -> Iterator[Finding]:
    config, found = context.config, context.need(context.model_config, "model")
    engine, native = config.rollout.engine, f"native covers {loading.SUPPORTED[found.model_type]}"
    said = {
        "native": f"{native}; {'vLLM is installed, too' if find_spec('vllm') else 'vLLM is not installed'}",
        "openai": f"the engine of the server has to cover {found.model_type}; {native}",
    }
    if engine == "vllm":
        from dapo.rollout.vllm.options import engine_arguments, find_vllm

        try:
            engine_arguments(config, context.need(context.shape, "model"), "", False, 1, 1, 0)
        except UserError as error:
            fix = "that, or rollout.engine=native, which covers the model"
            yield Finding(area_of(error, "model"), "engine", "fail", f"{error}; {native}", fix)
            return
        said["vllm"] = f"vLLM {find_vllm().__version__} covers {' and '.join(found.architectures)}; {native}"
    yours = f"{engine}: yours, what it covers is not known; {native}"
    yield Finding("model", "engine", "pass", said.get(engine, yours))


def check_server(context: CheckContext) -> Iterator[Finding]:
    """Whether a run can train through the server at ``rollout.url``, which is asked for one token."""
    if context.config.rollout.engine != "openai":
        return
    with extra("remote", "rollout.engine=openai"):
        from dapo.rollout.openai import OpenAIEngine
    config = with_values(context.config, {"rollout.give_up_after_s": 1.0})  # the default waits for one that starts

    async def ask() -> None:
        engine = OpenAIEngine(config, None)
        try:
            await engine.start([0], longest_sequence(config, context.heldout))
        finally:
            await engine.close()

    asyncio.run(ask())
    yield Finding("machine", "server", "pass", "the policy server answers with all that training needs")


def _absent(context: CheckContext, what: str, name: str, file: str) -> Finding | None:
    if context.demo and "/" in name and not Path(name).exists() and name.startswith("runs/"):
        return Finding("model", what, "skip", f"{name} is made by `{context.demo}`")
    if not on_this_machine(name, file):
        if not context.demo and not hub_answers():
            text = f"{name} is neither a folder nor in the cache of downloads, and the hub cannot be reached from here"
            return Finding("model", what, "fail", text, "model.path=FOLDER that holds it, or a network")
        return Finding("model", what, "skip", f"{name} is not on this machine and is not downloaded for a check")
    return None


def check_context(context: CheckContext) -> Iterator[Finding]:
    found = context.need(context.model_config, "model")
    try:
        check_lengths(context.config, found, context.heldout)
    except (ConfigError, DataError) as error:
        text, _, fix = str(error).rpartition("; ")
        yield Finding("recipe", "context", "fail", text or str(error), fix.removeprefix("use "))
        return
    prompt, response = context.config.data.max_prompt_length, context.config.rollout.max_response_length
    positions = loading.context_limit(found) or "any number of"
    text = f"{prompt} prompt and {response} response tokens fit into {positions}"
    yield Finding("model", "context", "pass", f"{text} positions")


def check_tokens(context: CheckContext) -> Iterator[Finding]:
    tokenizer, shape = context.need(context.tokenizer, "tokenizer"), context.need(context.shape, "model")
    config = context.config
    if context.template is not None:
        context.template.embedding_rows = shape.get_input_embeddings().weight.shape[0]
    owner = context.model or loading.with_generation_config(shape, config.model.path)
    heard = Heard()
    try:
        check_vocabulary(owner, tokenizer, config, heard)
    except ModelError as error:
        yield Finding("model", "vocabulary", "fail", str(error), "model.tokenizer=FOLDER of the model's own tokenizer")
        return
    except ConfigError as error:
        yield Finding("recipe", "stop-tokens", "fail", str(error), "mend what the line begins with")
        return
    rows = shape.get_input_embeddings().weight.shape[0]
    context.words_known = True
    if others := _of_another_model(context, rows):
        yield _warning("vocabulary", others, "leave model.tokenizer out, or name the model's own")
        return
    empty = max(0, rows - len(tokenizer))
    more = f"; {empty:,} rows have no token: one that is sampled is U+FFFD in the text" if empty else ""
    yield Finding("model", "vocabulary", "pass", f"the ids of all words lie below the model's {rows:,}{more}")
    yield from _stop_tokens(context, owner, loading.stop_token_ids(owner, tokenizer, config.rollout.stop_token_ids))
    notice_generation_config(owner, said := Heard())
    for text in said.warnings:
        yield _warning("generation-config", text, "take them out of generation_config.json")


def _of_another_model(context: CheckContext, rows: int) -> str | None:
    """Why the tokenizer seems to be another model's; None: it does not."""
    tokenizer, config = context.tokenizer, context.config
    unused = rows - len(tokenizer)
    if unused > max(1024, rows // 10):
        return f"the model has {rows:,} rows, but the tokenizer only {len(tokenizer):,} tokens: is it another model's?"
    if config.model.tokenizer is None:
        return None
    try:
        own = loading.load_tokenizer(config.model.path, config.model.trust_remote_code).get_vocab()
    except ModelError:  # it has none, which is why another one is named
        return None
    given = tokenizer.get_vocab()
    same = sum(own.get(token) == number for token, number in given.items())
    if same >= 0.9 * len(given):
        return None
    return f"{len(given) - same:,} of {len(given):,} tokens of model.tokenizer have another id in the model's own"


class Heard(QuietListener):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def _stop_tokens(context: CheckContext, owner: Any, stop_ids: tuple[int, ...]) -> Iterator[Finding]:
    tokenizer = context.tokenizer
    if not stop_ids:
        yield _warning(
            "stop-tokens",
            "neither model nor tokenizer names an end: every response runs to rollout.max_response_length",
            "rollout.stop_token_ids=[ID], or eos_token_id in generation_config.json",
        )
        return
    told = {
        "generation config": getattr(getattr(owner, "generation_config", None), "eos_token_id", None),
        "model config": owner.config.eos_token_id,
        "tokenizer": tokenizer.eos_token_id,
    }
    said = ", ".join(f"{who} {ids}" for who, ids in told.items() if ids is not None)
    end = _end_of_turn(context)
    if end is not None and end not in stop_ids:
        yield _warning(
            "stop-tokens",
            f"the chat template ends a turn with {tokenizer.convert_ids_to_tokens(end)!r}={end}, which is no stop "
            f"token ({said}): responses will run on",
            f"rollout.stop_token_ids=[{end}]",
        )
        return
    shown = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)}={i}" for i in stop_ids)
    yield Finding("model", "stop-tokens", "pass", f"{shown} ({said or 'the recipe'})")


_USER, _ASSISTANT = {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}


def _rendered(context: CheckContext, *turns: Mapping[str, str], **how: Any) -> Any:
    """Turns by the chat template; None: there is none, or it refuses them, which is told elsewhere."""
    if context.config.data.template == "plain" or not getattr(context.tokenizer, "chat_template", None):
        return None
    template = context.need(context.template, "template")
    try:
        return template.apply(turns, **how)
    except Exception:  # templates raise their own kinds
        return None


def _end_of_turn(context: CheckContext) -> int | None:
    """The special token that the chat template puts behind what an assistant says; None: there is none to be seen."""
    tokenizer = context.tokenizer
    ids = _rendered(context, _USER, _ASSISTANT, tokenize=True) if context.template is not None else None
    said = tokenizer(_ASSISTANT["content"], add_special_tokens=False)["input_ids"][-1:]
    if not ids or not said or said[0] not in ids:
        return None
    after = ids[len(ids) - ids[::-1].index(said[0]) :]
    return next((i for i in after if i in tokenizer.all_special_ids), None)


def check_bos(context: CheckContext) -> Iterator[Finding]:
    source = context.need(context.source, "tokenized data")
    tokenizer = context.tokenizer
    bos = tokenizer.bos_token_id
    if bos is None:
        yield Finding("model", "bos", "pass", "the tokenizer has none")
        return
    ids = list(source.prompts[0].token_ids)
    name = f"{tokenizer.bos_token}={bos}"
    written = _rendered(context, _USER, tokenize=False, add_generation_prompt=True) or ""
    opens = list(tokenizer("x")["input_ids"])[:1] == [bos]
    text = tokenizer.decode(ids[:8])
    if ids[:1] != [bos] and opens:
        told = f"the tokenizer begins texts with {name}, but a prompt by the chat template begins with {text!r}"
        yield _warning("bos", told, "put {{ bos_token }} in front of the chat template (data.chat_template=FILE)")
    elif str(written).startswith(tokenizer.bos_token * 2) or (ids.count(bos) > 1 and opens):
        told = f"{name} would stand twice in front of a prompt; here one of them is dropped, elsewhere it may not be"
        yield _warning("bos", told, "take it out of the chat template, or of the rows")
    else:
        yield Finding("model", "bos", "pass", f"{name}, {'once at the start' if ids[:1] == [bos] else 'not used'}")


def check_chat(context: CheckContext) -> Iterator[Finding]:
    """Whether the chat template writes all that it is given, and the head of the turn that the model is to fill."""
    data = context.config.data
    asked, bare = (_rendered(context, _USER, tokenize=False, add_generation_prompt=begin) for begin in (True, False))
    answered = _rendered(context, _USER, _ASSISTANT, tokenize=False)
    system = data.system and _rendered(context, {"role": "system", "content": data.system}, _USER, tokenize=False)
    if None in (asked, bare, answered) or (data.system and system is None):
        return
    head = answered.removeprefix(bare).partition("4")[0].strip() if answered.startswith(bare) else ""
    if asked == bare and head:
        text = f"the chat template heeds no add_generation_prompt: an answer begins with {head!r}, and a prompt does "
        text += "not end in it"
        fix = f"add {{% if add_generation_prompt %}}{head}{{% endif %}} to it (data.chat_template=FILE)"
        yield _warning("chat-template", text, fix)
    if data.system and data.system.strip() not in str(system):
        fix = "data.instruction=TEXT, which stands in the user's message, or another data.chat_template=FILE"
        text = f"the chat template leaves data.system out: {data.system[:60]!r} is in no prompt"
        yield _warning("chat-template", text, fix)


def check_tools(context: CheckContext) -> Iterator[Finding]:
    source, template = context.need(context.source, "tokenized data"), context.need(context.template, "template")
    if told := hidden_tools(context.config, template, source.prompts[0]):
        yield _warning("tools", told, SHOW_TOOLS)


def check_weights(context: CheckContext) -> Iterator[Finding]:
    if context.config.runtime.kind == "ray":
        yield Finding("model", "weights", "skip", "they are loaded by the workers only")
        return
    config = context.config
    context.need(context.shape, "model")
    device = context.need(context.device, "device")
    context.need(context.fits, "memory")
    try:
        model = load_trainable(config.model.path, config.model, device)
        model = begin_adapter(model, config.model, config.seed)
    except (ModelError, ConfigError) as error:
        yield Finding("model", "weights", "fail", str(error), "download or save the model again")
        return
    context.model = model
    set_threads(config, model)
    yield Finding("model", "weights", "pass", "all there, all finite")
