"""A model in a few numbers, by which a resumed run can tell whether it is still the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_ALL_UP_TO = 2**28  # weights that are hashed one and all; of larger models evenly spaced ones, so that it takes seconds


def fingerprint_model(model: Any, device: torch.device) -> dict[str, Any]:
    """Of a model that is to be trained on ``device``, before anything is put on it."""
    parameters = list(model.named_parameters())
    total = sum(p.numel() for _, p in parameters)
    stride = max(1, -(-total // _ALL_UP_TO))
    digest = hashlib.sha256()
    for name, parameter in parameters:
        values = parameter.detach().reshape(-1)[::stride].to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    settings = model.config.to_diff_dict().items()  # what changes the numbers that a model computes
    ignored = ("transformers_version", "dtype", "torch_dtype", "architectures")
    found = {
        "type": model.config.model_type,
        "parameters": total,
        "weights": digest.hexdigest()[:16],
        "config": short_hash(
            [sorted((k, str(v)) for k, v in settings if not k.startswith("_") and k not in ignored), stop]
        ),
    }
    return {"device": device.type, "model": found}


def short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode("utf-8", "surrogatepass")).hexdigest()[:16]
