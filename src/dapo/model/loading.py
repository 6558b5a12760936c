"""Loading models and tokenizers, and refusing by name what the code would compute wrongly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from dapo.errors import ModelError
from dapo.model.attention import ATTENTION_NAME, register_attention

# Architectures whose attention goes through the interface and whose log-probabilities are compared with Transformers'
# own in tests/model. What is not here is refused: a model that runs is not yet a model that is right.
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


def load_model(source: Any, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """A causal language model whose attention is ours, in eval mode.

    Args:
        source: folder in Hugging Face layout, name on the hub, or a loaded ``PreTrainedModel`` (used as it is: its
            parameters are changed to ``dtype`` in place).
        dtype: type of the parameters.
        trust_remote_code: allow code that comes with the model to run.

    Raises:
        ModelError: not found, not readable, or an architecture that is not supported.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading and saving: the listener tells what is going on
    register_attention()
    if isinstance(source, str | Path):
        model = _from_pretrained(str(source), dtype, trust_remote_code)
    else:
        check_supported(source.config)
        model = source.to(dtype)
        model.set_attn_implementation(ATTENTION_NAME)
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"model: the weights {name} hold NaN or infinity")
    return model.eval()


def _from_pretrained(path: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_explain("model", path, error)) from None
    check_supported(config)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged weight file raises whatever its reader raises
        raise ModelError(_explain("model", path, error)) from None
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report.get(kind) or ()))
        if names:
            what = kind.removesuffix("_keys")
            raise ModelError(f"model {path}: {len(names)} {what} weights, such as {names[0]}; is this its config.json?")
    return model


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer at ``path``.

    Raises:
        ModelError: not found or not readable.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(_explain("tokenizer", path, error)) from None
    # for a folder with a model alone, Transformers makes up a tokenizer that knows no token
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(f"tokenizer {path}: there are no tokenizer files; name another folder in model.tokenizer")
    return tokenizer


def _explain(what: str, path: str, error: Exception) -> str:
    local = Path(path).expanduser()
    if local.exists() or path.startswith((".", "/", "~")):
        state = "exists but cannot be loaded" if local.exists() else "no such folder"
        return f"{what} {path}: {state}: {_first_line(error)}"
    return f"{what} {path}: neither a local folder nor found on the hub: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def check_supported(config: Any) -> None:
    """Refuse an architecture or option that attention or head would compute wrongly.

    Raises:
        ModelError: naming the architecture and what is supported.
    """
    kind = getattr(config, "model_type", "unknown")
    if kind not in SUPPORTED:
        names = ", ".join(SUPPORTED.values())
        raise ModelError(f"model architecture {kind!r} is not supported by the native engine; supported: {names}")
    if kind == "gpt2" and getattr(config, "add_cross_attention", False):
        raise ModelError("model architecture 'gpt2' with cross-attention is not supported")
    if kind == "gpt2" and getattr(config, "reorder_and_upcast_attn", False):
        raise ModelError("model architecture 'gpt2' with reorder_and_upcast_attn is not supported")


def copy_model(model: Any, dtype: torch.dtype) -> Any:
    """A frozen copy of ``model`` in ``dtype``, for the engine or as the reference policy."""
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for parameter in twin.parameters():
        # not the buffers: rotary frequencies in bfloat16 are off by half a radian at position 1,000
        parameter.data = parameter.data.to(dtype)
    return twin


def stop_token_ids(model: Any, tokenizer: Any, extra: tuple[int, ...] | list[int] = ()) -> tuple[int, ...]:
    """Every id that ends a response: generation config, model config, tokenizer and ``extra``, none twice.

    Each of the three may hold an integer, a list or nothing.
    """
    found: list[int] = []
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found += [ids] if isinstance(ids, int) else list(ids or [])
    return tuple(dict.fromkeys([*found, *extra]))


def context_limit(model: Any) -> int | None:
    """The longest sequence in tokens that the position encoding was made for; None: not stated."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return int(limit) if limit else None
