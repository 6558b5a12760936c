"""What runs in vLLM's workers: weights are received, loaded and checked. (A stand-in until the checks are here.)"""

from __future__ import annotations

from typing import Any

ADAPTER = ("dapo", 1)
"""Name and number that vLLM knows the adapter by."""


class Receiver:
    """vLLM mixes this into its worker (``worker_extension_cls``)."""

    model_runner: Any

    vllm_config: Any

    def dapo_begin(self, version: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def dapo_load(self, path: str) -> None:
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(load_file(path).items())

    def dapo_commit(self) -> str | None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
        return None
