"""A run's vLLM engine over a tiny model, for tests of the weights that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.config import build_config, nested
from dapo.rollout.engine import Request, Sampling, hand_over
from dapo.rollout.vllm import options

# heads that vLLM's kernels for CPUs have
SHAPE = {"vocab_size": 203, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
Tensors = list[tuple[str, torch.Tensor]]


@dataclass
class Vllm:
    """An engine, a model whose weights it is given, and the loop that both live in."""

    engine: Any
    model: Any
    runner: asyncio.Runner

    def call(self, method: str, *args: Any) -> Any:
        """Of the first worker."""
        return self.runner.run(self.engine._rpc(method, args))[0]

    def change(self, scale: float = 0.02) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * scale)

    async def give(self, spoil: Callable[[Tensors], Tensors] = list) -> None:
        """The model's weights, of which ``spoil`` changes what is sent."""
        tensors = [(name, p.detach()) for name, p in self.model.named_parameters() if p.requires_grad]
        await asyncio.wait_for(hand_over(self.engine, self.engine.version + 1, spoil(tensors)), 60)

    def push(self, spoil: Callable[[Tensors], Tensors] = list) -> None:
        self.runner.run(self.give(spoil))

    def logprobs(self, ids: torch.Tensor, prompt: int) -> Any:
        """Of the tokens after the prompt, by the model's forward pass."""
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(ids).logits[0, prompt - 1 : -1].float(), -1)
        return logprobs.gather(1, ids[0, prompt:, None])[:, 0].numpy()

    def mismatch(self, requests: Sequence[Request] = ()) -> float:
        """Largest difference between the log-probabilities of samples and those of the model's forward pass."""
        asked = requests or [Request(n, (n + 2, 3, 5), (n, n + 9), Sampling(1.0, 8)) for n in range(3)]

        async def sample() -> list[Any]:
            return [(asked[one.request_id].prompt_ids, one) async for one in self.engine.generate(asked)]

        found = self.runner.run(sample())
        rows = [
            (torch.tensor([[*prompt, *one.token_ids.tolist()]]), len(prompt), one.logprobs) for prompt, one in found
        ]
        return max(float(np.abs(self.logprobs(ids, prompt) - have).max()) for ids, prompt, have in rows)


def started(model: Any, folder: Path = Path("none"), longest: int = 48, **settings: Any) -> Iterator[Vllm]:
    """Yields it once. ``longest``: tokens of prompt and response."""
    from dapo.rollout.vllm import engine as module

    def arguments(*args: Any) -> dict[str, Any]:
        return options.engine_arguments(*args) | {"worker_extension_cls": "vllm_faults.FaultyReceiver"}

    given = {"model.path": str(folder), "model.compute_dtype": "float32", "rollout.engine": "vllm"}
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "engine_arguments", arguments)
        config = build_config(nested(given | settings))
        engine = module.VLLMEngine(config, model, [0], max_sequence_tokens=longest, max_concurrent_samples=8)
        try:
            yield Vllm(engine, model, runner)
        finally:
            runner.run(engine.close())
