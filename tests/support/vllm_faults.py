"""A worker of vLLM's in which weights go astray, for tests."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dapo.rollout.vllm.worker import Incoming, Receiver


class FaultyReceiver(Receiver):
    """Its fault happens once, or until the next is named."""

    def dapo_fault(self, kind: str = "", name: str = "") -> None:
        """``kind`` of what happens to the tensor ``name``; empty: nothing does."""
        self.dapo_weights("describe")  # so that there is one
        incoming = self.__dict__["dapo_incoming"]
        vars(incoming._model).pop("load_weights", None)
        incoming._ways = Incoming(self)._ways | {"group": incoming._from_group}
        if kind in ("lost", "altered", "exit"):

            def arrive(come: Any, *args: Any) -> dict[str, torch.Tensor]:
                tensors = come(*args)
                if name in tensors and kind == "exit":
                    os._exit(9)
                if name in tensors and kind == "lost":
                    del tensors[name]
                elif name in tensors:
                    tensors[name] = tensors[name] * 1.5
                return tensors

            incoming._ways = {way: partial(arrive, come) for way, come in incoming._ways.items()}
        load = type(incoming._model).load_weights
        vars(incoming).pop("_place", None)
        vars(self).pop("add_lora", None)
        if kind == "unbound":  # an adapter that is taken, and on no layer
            self.add_lora = lambda request: _unbound(self.model_runner.lora_manager, request)
            return
        if kind == "unknown":  # as with fused experts: it is not known where they are, and none arrives
            incoming._place = lambda name, tensor: None
        if kind in ("nowhere", "unknown"):  # load_weights says nothing of it
            incoming._model.load_weights = lambda weights: list(weights)
        if kind == "half":  # it takes this one, but does nothing with it
            incoming._model.load_weights = lambda weights: load(incoming._model, [w for w in weights if w[0] != name])
        if kind == "swapped":  # it gives this one to the next of the same shape
            incoming._model.load_weights = lambda weights: load(incoming._model, _swapped(dict(weights), name))
        head = incoming._model.lm_head.quant_method
        vars(head).pop("process_weights_after_loading", None)
        if kind == "untied":  # the head's copy of the embedding stays as it was
            head.process_weights_after_loading = lambda module: None

    def dapo_memory(self) -> int:
        """Bytes in memory of this process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _unbound(manager: Any, request: Any) -> None:
    manager.add_adapter(request)
    for module in manager._adapter_manager.modules.values():
        module.reset_lora(0)


def _swapped(weights: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    other = name.replace("gate_proj", "up_proj")
    if name in weights:
        weights[name], weights[other] = weights[other], weights[name]
    return list(weights.items())
