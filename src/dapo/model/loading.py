"""Loading models and tokenizers, and refusing by name what the code would compute wrongly."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dapo.errors import ModelError, first_line
from dapo.model.adapters import adapter_parameters, as_a_reward, check_ends, find_adapter, has_adapter, put_on
from dapo.model.attention import ATTENTION_NAME, register_attention
from dapo.model.hub import LOADING, from_where, hub_answers, unreachable
from dapo.model.tokenizer import as_its_file_says, source_folder
from dapo.util.files import holds_model

# Architectures whose attention goes through the interface and whose tokens and log-probabilities are compared with
# Transformers' own in tests/rollout. What is not here is refused: a model that runs is not yet a model that is right.
SUPPORTED = {
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "llama": "Llama, SmolLM2",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt2": "GPT-2",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies are the same at every length of the sequence. For others they depend on the
longest sequence of the forward pass, so that a sample's log-probabilities would depend on its neighbours."""


def load_model(
    source: Any,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    adapter_dtype: torch.dtype | None = None,
) -> Any:
    """A causal language model whose attention is ours, in eval mode.

    Args:
        source: folder in Hugging Face layout, name on the hub, folder of a LoRA adapter in PEFT layout (its base is
            loaded and the adapter put on it, unmerged), or a loaded ``PreTrainedModel`` (used as it is: its parameters
            are changed to ``dtype`` in place).
        trust_remote_code: allow code that comes with the model to run.
        device: where the model is to be; None: the CPU, and a loaded one stays where it is. With accelerate installed
            weights are read right onto it.
        adapter_dtype: type of an adapter's parameters; None: ``dtype``.

    Raises:
        ModelError: not found, not readable, or an architecture, an option or an adapter that is not supported.
    """
    with LOADING:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of loading and saving: the listener tells what is going on
        register_attention()
        if isinstance(source, str | Path):
            adapter, where = find_adapter(source), device or "cpu"
            model = _from_pretrained(adapter.base if adapter else str(source), dtype, trust_remote_code, where)
            if adapter:
                model = put_on(model, adapter, adapter_dtype or dtype)
        else:
            model = _taken_as_it_is(source)
            model.source_dtype = next(p.dtype for p in model.parameters())
    _cast(model, dtype, adapter_dtype)
    try:
        if device is not None:
            model.to(device)
    except torch.OutOfMemoryError:
        raise _too_large("model", model, dtype, device) from None
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ModelError(f"model: the weights {name} hold NaN or infinity")
    return model.eval()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all its numbers are, without a copy, which of a large embedding would take gigabytes."""
    known = not tensor.is_floating_point() or not tensor.numel()
    return known or bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def _taken_as_it_is(model: Any) -> Any:
    if hasattr(model, "get_base_model"):
        raise ModelError("model: a PeftModel wraps the model; give its folder, or the model inside, .base_model.model")
    check_supported(model.config)
    check_ends(model)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def _cast(model: Any, dtype: torch.dtype, adapter_dtype: torch.dtype | None = None) -> None:
    """Parameters only, not buffers: rotary frequencies in bfloat16 are off by half a radian at position 1,000."""
    adapter = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(adapter_dtype or dtype if name in adapter else dtype)


def _from_pretrained(path: str, dtype: torch.dtype, trust_remote_code: bool, device: torch.device | str) -> Any:
    from transformers import AutoModelForCausalLM

    config = read_config(path, trust_remote_code)
    check_supported(config)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **from_where(path),
            **_straight_to(device),
        )
    except torch.OutOfMemoryError:
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config)
        raise _too_large(f"model {path}", shape, dtype, device) from None
    except Exception as error:  # a damaged weight file raises whatever its reader raises
        raise ModelError(_explain("model", path, error)) from None
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report.get(kind) or ()))
        if names:
            what = kind.removesuffix("_keys")
            raise ModelError(f"model {path}: {len(names)} {what} weights, such as {names[0]}; is this its config.json?")
    model.source_dtype = config.dtype or dtype_on_disk(path)
    if has_adapter(model):  # Transformers puts on one that it finds on the hub, of any kind
        raise ModelError(f"model {path}: is an adapter on the hub; download it and name its folder")
    return model


def dtype_on_disk(path: str) -> torch.dtype:
    """Type of the weights of a model whose config does not state it: that of the first, as Transformers takes it."""
    from safetensors import safe_open

    for file in sorted((source_folder(path) or Path(path)).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            return next((weights.get_tensor(name).dtype for name in weights.keys()), torch.float32)  # noqa: SIM118
    return torch.float32


def read_config(path: str, trust_remote_code: bool = False) -> Any:
    """Transformers' config of the model at ``path``, of whatever architecture; of an adapter that of its base.
    Raises ModelError: not found, not readable, or a value in it is none that the architecture knows."""
    path = adapter.base if (adapter := find_adapter(path)) else path
    where = from_where(path)
    try:
        with LOADING:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **where)
    except Exception as error:  # a value of the wrong kind raises whatever looks at it first
        raise ModelError(_explain("model", path, error)) from None


def _too_large(what: str, model: Any, dtype: torch.dtype, device: torch.device | str | None) -> ModelError:
    """For a model that does not fit onto a GPU: what it takes and what there is."""
    size = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    free, whole = torch.cuda.mem_get_info(device)
    have = f"{free / 2**30:.1f} of {whole / 2**30:.1f} GiB of {device} are free"
    hint = "; model.compute_dtype=bfloat16 takes half of that" if dtype == torch.float32 else ""
    return ModelError(f"{what}: its weights take {size / 2**30:.1f} GiB in {str(dtype)[6:]}, but {have}{hint}")


def _straight_to(device: torch.device | str) -> dict[str, Any]:
    """Arguments that make Transformers read weights right onto ``device``; it needs accelerate for that."""
    elsewhere = torch.device(device).type != "cpu"
    return {"device_map": {"": device}} if elsewhere and importlib.util.find_spec("accelerate") else {}


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer at ``path``, as its tokenizer.json says; that of its base for an adapter's folder without one.
    Raises ModelError: not found or not readable, or its files contradict each other."""
    own = Path(path).expanduser() / "tokenizer_config.json"
    if not os.path.isfile(own) and (adapter := find_adapter(path)):  # noqa: PTH113  (the method raises for a name that is too long)
        path = adapter.base
    try:
        with LOADING:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **from_where(path))
        # for a folder with a model alone, Transformers makes up a tokenizer that knows no token
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ModelError(f"tokenizer {path}: there are no tokenizer files; name another folder in model.tokenizer")
        return as_its_file_says(tokenizer, path)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(_explain("tokenizer", path, error)) from None


def _explain(what: str, path: str, error: Exception) -> str:
    local = Path(path).expanduser()
    if local.exists() or path.startswith((".", "/", "~")):
        inside = next((name for name in ("model-after", "model") if holds_model(local / name)), None)
        if inside:
            return f"{what} {path}: is a run or checkpoint of dapo, not a model; its model is {local / inside}"
        if local.is_dir() and not any(local.glob("*.json")):
            return f"{what} {path}: is not a model's folder: it holds no config.json"
        state = "exists but cannot be loaded" if local.exists() else "no such folder"
        return f"{what} {path}: {state}: {first_line(error)}"
    if not hub_answers():
        return unreachable(what, path)
    return f"{what} {path}: neither a local folder nor found on the hub: {first_line(error)}"


def check_supported(config: Any) -> None:
    """Refuse an architecture or option that attention or head would compute wrongly.
    Raises ModelError: naming the architecture and what is supported."""
    kind = getattr(config, "model_type", "unknown")
    named = [name for name in getattr(config, "architectures", None) or () if name.endswith("SequenceClassification")]
    if named:
        path = getattr(config, "name_or_path", "") or "FOLDER"
        raise ModelError(f"model {path}: is a reward model ({named[0]}), which writes no text; {as_a_reward(path)}")
    if kind not in SUPPORTED:
        hint = _HINTS.get(kind, "")
        raise ModelError(
            f"model architecture {kind!r} is not supported by the native engine{hint}; supported: "
            f"{', '.join(SUPPORTED.values())}. {_ELSEWHERE}"
        )
    for what in _unsupported_options(config):
        raise ModelError(f"model architecture {kind!r} with {what} is not supported by the native engine. {_ELSEWHERE}")


MAYBE_SERVED = "vLLM may know it, if it is a causal language model"
_ELSEWHERE = (
    f"It cannot be trained (docs/models.md); to serve, evaluate, generate (rollout.engine=vllm): {MAYBE_SERVED}"
)
_HINTS = {"gemma3": " (images and text; the text models, gemma3_text, are)"}


def _unsupported_options(config: Any) -> Iterator[str]:
    """Options under which a supported architecture computes something that attention or head do not."""
    kind = config.model_type

    def given(name: str) -> Any:
        return getattr(config, name, None)

    if given("quantization_config"):
        yield "quantized weights (quantization_config)"
    if given("use_bidirectional_attention"):
        yield "use_bidirectional_attention"
    if kind == "gpt2" and given("add_cross_attention"):
        yield "cross-attention (add_cross_attention)"
    if kind == "gpt2" and given("reorder_and_upcast_attn"):
        yield "reorder_and_upcast_attn"
    # where Transformers' own module ignores them, they cannot have been part of the training
    if kind != "gemma2" and given("attn_logit_softcapping"):
        yield "attn_logit_softcapping, which is Gemma 2's,"
    if kind not in ("gemma2", "gemma3_text") and given("final_logit_softcapping"):
        yield "final_logit_softcapping, which is Gemma 2's and 3's,"
    for layer_type in sorted(set(given("layer_types") or ()) - {"full_attention", "sliding_attention"}):
        yield f"layers of type {layer_type}"
    parameters = given("rope_parameters") or {}
    for rope in [p for p in parameters.values() if isinstance(p, dict)] or [parameters]:  # Gemma 3: by layer type
        name = rope.get("rope_type", "default")
        if name not in ROPE_TYPES:
            yield f"rope type {name!r} (those that work: {', '.join(ROPE_TYPES)})"
        if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
            yield "partial_rotary_factor"


def copy_model(model: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """A frozen copy of ``model`` in ``dtype`` and on ``device`` (None: its own), for the engine or as the reference
    policy.

    Parameters that are frozen in ``model`` already, of that type and there, are the same ones in both: of a base under
    an adapter there is one, whoever computes with it.
    """
    known: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        here = parameter.detach()
        there = here.to(device or here.device, (dtype if here.is_floating_point() else None) or here.dtype)
        if there is not here:
            known[id(parameter)] = torch.nn.Parameter(there, requires_grad=False)
        elif not parameter.requires_grad:
            known[id(parameter)] = parameter
    return copy.deepcopy(model, known).eval().requires_grad_(False).to(device)


def stop_token_ids(model: Any, tokenizer: Any, extra: tuple[int, ...] | list[int] = ()) -> tuple[int, ...]:
    """Every id that ends a response: generation config, model config, tokenizer and ``extra``, none twice."""
    found = [i for ids in named_stop_ids(model, tokenizer).values() for i in ids]
    return tuple(dict.fromkeys([*found, *extra]))


def with_generation_config(shape: Any, path: str) -> Any:
    """``shape`` with the file beside the weights, which is read with these only."""
    from transformers import GenerationConfig

    try:
        shape.generation_config = GenerationConfig.from_pretrained(path, **from_where(path))
    except (OSError, ValueError):  # there need not be one
        return shape
    return shape


def named_stop_ids(model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """The ids that end a response by where they are stated, as messages call it. Each may be an integer, a list or
    nothing."""
    owners = {
        "eos_token_id of generation_config.json": getattr(model, "generation_config", None),
        "eos_token_id of config.json": model.config,
        "the tokenizer's eos_token": tokenizer,
    }
    stated = {name: getattr(owner, "eos_token_id", None) for name, owner in owners.items()}
    return {name: [ids] if isinstance(ids, int) else list(ids or []) for name, ids in stated.items()}


def embedding_rows(source: Any, trust_remote_code: bool = False) -> int | None:
    """How many tokens a model knows, before its weights are read; None: its config does not state it.
    Raises ModelError: as :func:`read_config`."""
    if not isinstance(source, str | Path):
        return int(source.get_input_embeddings().weight.shape[0])
    return getattr(read_config(str(source), trust_remote_code), "vocab_size", None)


POSITIONS_STATED = "max_position_embeddings and rope_scaling in its config.json"
"""For messages: where more can be stated for a model that can do more."""
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "seq_length",
)
"""What a config may call the longest sequence; of several the smallest holds."""


def context_limit(config: Any) -> int | None:
    """The longest sequence in tokens that the position encoding was made for, as engines derive it; None: not stated.

    Rotary settings that stretch positions multiply it: YaRN its ``original_max_position_embeddings``, linear and
    dynamic scaling ``max_position_embeddings``, unless they name the original too. Those of Llama 3 and Gemma 3 are
    in ``max_position_embeddings`` already.
    """
    stated = [int(value) for name in _LENGTHS if (value := getattr(config, name, None))]
    rotary = getattr(config, "rope_parameters", None) or {}
    kind, factor = rotary.get("rope_type", "default"), rotary.get("factor")
    if not stated or factor is None or kind not in ("yarn", "linear", "dynamic"):  # Gemma 3: by type of layer
        return min(stated, default=None)
    return int((rotary.get("original_max_position_embeddings") or min(stated)) * factor)


def key_value_heads(text_config: Any) -> tuple[int, int]:
    """Heads that a cache holds keys and values of, and the numbers in each."""
    heads = text_config.num_attention_heads
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return getattr(text_config, "num_key_value_heads", None) or heads, width


def cached_numbers(text_config: Any) -> int:
    """Numbers that a cache holds for a token in each layer: its keys and values."""
    return 2 * math.prod(key_value_heads(text_config))
