"""The initial policy that a KL is measured to, and where it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from dapo.errors import ConfigError
from dapo.model.adapters import adapter_parameters
from dapo.model.loading import copy_model
from dapo.records import TokenBatch
from dapo.training.policy import Policy


def reference_policy(policy: Policy, kept: Literal["copy", "base", "offload"]) -> Policy:
    """``policy`` as it is now, for good: a copy, or one in main memory. ``base``: the model under its adapter.
    Raises ConfigError: that is another policy."""
    if kept == "copy":
        return policy.frozen_copy()
    how: dict[str, Any] = {one.name: getattr(policy, one.name) for one in fields(policy)}
    if kept == "base":
        adds = (p for name, p in adapter_parameters(policy.model).items() if ".lora_B." in name)
        if any(bool(p.any()) for p in adds):
            raise ConfigError(
                "algorithm.kl.reference: base is the model under its adapter, but the adapter of model.path changes "
                "it, so the base is not the policy that the run begins with; use reference=copy"
            )
        return _Base(**how)
    how["model"] = copy_model(policy.model, device=torch.device("cpu"))
    return _Offloaded(**how, home=str(policy.device))


@dataclass(frozen=True, slots=True, eq=False)
class _Base(Policy):
    """The policy without its adapter."""

    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        with _without_adapter(self.model):
            return Policy.logprobs(self, batch)


@dataclass(frozen=True, slots=True, eq=False)
class _Offloaded(Policy):
    """On its device only while it computes."""

    home: str = "cpu"

    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        self.model.to(self.home)
        try:
            return Policy.logprobs(self, batch)
        finally:
            self.model.to("cpu")


@contextmanager
def _without_adapter(model: Any) -> Iterator[None]:
    layers = [module for module in model.modules() if hasattr(module, "base_layer")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
