"""Tiny models with random weights and real architectures, and a tokenizer for them. No downloads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from dapo.model import exact

VOCAB = 48

_COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_LLAMA_LIKE = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **_LLAMA_LIKE, "tie_word_embeddings": True},
    "qwen2-sliding": {
        "model_type": "qwen2",
        **_LLAMA_LIKE,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_LLAMA_LIKE, "head_dim": 16},
    "llama": {"model_type": "llama", **_LLAMA_LIKE, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", **_LLAMA_LIKE, "sliding_window": 8},
    "gemma": {"model_type": "gemma", **_LLAMA_LIKE, "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        **_LLAMA_LIKE,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_LLAMA_LIKE,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
    },
    "gpt2": {
        "model_type": "gpt2",
        **_COMMON,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
}


def most_allocated(work: Callable[[], Any]) -> int:
    """Bytes of tensors on the CPU that ``work`` has at once, at most."""
    from torch.profiler import ProfilerActivity, profile

    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def let_one_number_be_an_index(monkeypatch: Any) -> None:
    """Triton 3.6 interprets loop bounds as arrays of one element, which NumPy 2.4 no longer takes for numbers."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def random_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """An unmodified Transformers model (its own attention). Weights are large enough for logits to differ clearly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = ARCHITECTURES[name] | changes
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def put_operations_back() -> None:
    """PyTorch's own, where anything was exact in this process; no thread is any more."""
    assert not exact.in_use()
    if exact._library is not None:
        exact._library._destroy()
        exact._library = None
