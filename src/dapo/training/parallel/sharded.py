"""How a rank holds some rows of each tensor of a model, by FSDP2.

A module of its own, imported by ranks only: PyTorch's part for it takes a second or more to import.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dapo.errors import ConfigError, ModelError
from dapo.model.adapters import has_adapter
from dapo.model.compiling import decoder_layers
from dapo.model.export import is_tied, keeps, write_description
from dapo.training.checkpoint import INDEX, METADATA, TENSORS, read_tensors
from dapo.training.parallel.holding import MODEL, Parameters, Replica
from dapo.training.parallel.ranks import ProcessRanks, Ranks
from dapo.training.parallel.shards import folder_of_all, write_shards
from dapo.util.files import write_json


class Sharded(Replica):
    """FSDP2: this rank's rows of every tensor in float32; a layer is gathered when it computes, in the compute type.

    What is outside of the layers (embedding, last norm, head; tied or not) is one group, gathered in float32 before the
    first forward pass of an update and let go of after its last: the head is read by chunks outside of any module, so
    its gradient is there before that of the backbone. Numbers are as in one process but for norms and biases of the
    layers, which are rounded with the rest of a layer.
    """

    lockstep = True
    ranks: ProcessRanks

    def __init__(self, ranks: ProcessRanks, device: torch.device, cpu_offload: bool = False) -> None:
        """``cpu_offload``: keep parameters, gradients and moments in the host's memory, and make the steps there."""
        super().__init__(ranks, device)
        self._offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
        self._sharded: dict[str, Any] = {}

    def take(self, model: Any, compute_dtype: torch.dtype) -> dict[str, nn.Parameter]:
        """Raises ConfigError: an adapter is on it."""
        if has_adapter(model):
            raise ConfigError(
                "model.lora: an adapter is trained with its base whole on every rank; a base that does not fit on one "
                "device is not supported"
            )
        self._tied = is_tied(model)
        mesh = DeviceMesh.from_group(self.ranks.group, self.device(model).type)
        narrow = compute_dtype if compute_dtype != torch.float32 else None
        settings: dict[str, Any] = {"mesh": mesh, "offload_policy": self._offload}
        # autocast casts what goes into a product, and what is between the layers stays float32
        policy = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
        for layer in decoder_layers(model):
            fully_shard(layer, **settings, mp_policy=policy)
        # the backbone is what is called, but the head is to be in its group
        root: Any = model.base_model
        root.add_module("head_of_the_group", model.get_output_embeddings())
        fully_shard(root, **settings, reshard_after_forward=False)
        del root.head_of_the_group
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the sum over ranks, not the mean
                module.set_force_sum_reduction_for_comms(True)
        self._root, self._model = root, model
        self._sharded = dict(model.named_parameters())
        if self._tied and not is_tied(model):
            raise RuntimeError("the tied head was untied")
        return {name: nn.Parameter(p.to_local().detach(), p.requires_grad) for name, p in self._sharded.items()}

    def begin_update(self, parameters: Parameters) -> None:
        super().begin_update(parameters)
        self._model.zero_grad()  # of the root gathered whole, if an update failed midway
        self._root.reshard()
        self._model.zero_grad()  # of this rank's rows

    def begin_pass(self, last: bool) -> None:
        self._root.set_requires_gradient_sync(last, recurse=False)
        self._root.set_reshard_after_backward(last, recurse=False)

    def end_passes(self) -> None:
        self._root.reshard()

    def collect(self, parameters: Parameters) -> None:
        for name, parameter in parameters.items():
            gradient, self._sharded[name].grad = self._sharded[name].grad, None
            parameter.grad = None if gradient is None else gradient.to_local()

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        mine = super().norm(gradients)
        total = sum(part * part for part in self.ranks.gather(float(mine)))
        return torch.tensor(total**0.5, device=mine.device)

    @torch.no_grad()
    def whole(self, name: str, values: torch.Tensor) -> torch.Tensor:
        shape, size = self._sharded[name].shape, self.ranks.size
        if not values.dim() or size == 1:
            return values
        rows = -(-shape[0] // size)
        mine = torch.zeros(rows, *shape[1:], dtype=values.dtype, device=self._device)
        mine[: len(values)] = values
        found = mine.new_empty(rows * size, *shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(found, mine, group=self.ranks.group)
        return found[: shape[0]]

    def frozen(self, model: Any, copies: dict[int, Any], ranks: Ranks) -> tuple[Any, Replica]:
        found = copy.copy(self)
        found.ranks, found._device = cast("ProcessRanks", ranks), torch.device("cpu")
        return model, found  # of which only the description is read

    # --- files ----------------------------------------------------------------------------------------------------

    def save_model(self, model: Any, folder: Path, parameters: Parameters, **how: Any) -> None:
        dtype = how.get("dtype") or torch.float32
        fits = self.ranks.gather(keeps(parameters.values(), dtype, how.get("exact", False)))
        kept = dtype if all(fits) else torch.float32
        makers = {name: partial(self.whole, name, p.detach().to(kept)) for name, p in parameters.items()}
        with folder_of_all(self.ranks, folder) as staging:
            places = write_shards(self.ranks, staging, MODEL, makers)

            def describe() -> None:
                size = sum(p.numel() for p in self._sharded.values()) * kept.itemsize
                write_json(staging / f"{MODEL}.index.json", {"metadata": {"total_size": size}, "weight_map": places})
                config = copy.copy(model.config)
                config.architectures = [type(model).__name__]
                config.save_pretrained(staging)
                write_description(model, staging, kept, how.get("stop_ids", ()), self._tied)

            self.ranks.together(describe, alone=(0,))

    @torch.no_grad()
    def load_weights(self, model: Any, folder: Path, parameters: Parameters) -> None:
        """Raises ModelError: missing or damaged, or of another model."""

        def load() -> None:
            try:
                found = read_tensors(folder, MODEL, self.rows)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                raise ModelError(f"{folder}: the weights cannot be read: {type(error).__name__}: {error}") from None
            if any(name not in found or found[name].shape != p.shape for name, p in parameters.items()):
                raise ModelError(f"{folder}: holds the weights of another model")
            for name, parameter in parameters.items():
                parameter.copy_(found[name])

        self.ranks.together(load)

    def save_tensors(self, folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
        makers = {key: partial(self.whole, key.rpartition("/")[0], tensor) for key, tensor in tensors.items()}
        with folder_of_all(self.ranks, folder) as staging:
            places = write_shards(self.ranks, staging, TENSORS, makers)

            def describe() -> None:
                write_json(staging / INDEX, {"metadata": {}, "weight_map": places})
                write_json(staging / METADATA, {**metadata, "tensors": sorted(tensors)})

            self.ranks.together(describe, alone=(0,))

    def rows(self, _: str, count: int) -> slice:
        """As FSDP2 deals them out."""
        each = -(-count // self.ranks.size)
        return slice(min(self.ranks.rank * each, count), min((self.ranks.rank + 1) * each, count))
