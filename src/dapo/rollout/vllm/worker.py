"""In vLLM's workers: new weights are received, put in place, and looked for there.

Consumes what :class:`~dapo.rollout.vllm.transfer.WeightTransfer` sends. Three things are asked of every update: that
each tensor arrived as it was sent, that each module of vLLM's model got some, and that the model computes with them.
For the last, some columns of each matrix are read back from where vLLM has it (its own part of a fused or split one; on
a CPU through the multiplication, as vLLM keeps no plain matrix there), unless that place is not known, as with fused
experts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, load_file

from dapo.model.adapters import WEIGHTS_FILE, file_key
from dapo.rollout.engine import EngineError, check_arrived, some_elements
from dapo.rollout.group import Group, Layout, unpacked

ADAPTER = ("dapo", 1)
"""Name and number that vLLM knows the adapter by. Requests name it, so they stay the same at a new version."""

_COLUMNS = 4  # of a matrix that are read back; others at each version


class Receiver:
    """What vLLM adds to its worker class (``worker_extension_cls``)."""

    def dapo_weights(self, step: str, *args: Any) -> dict[str, Any]:
        """Do a step of :class:`Incoming`; its EngineError comes back as text, not through vLLM's error handling."""
        from vllm.config import set_current_vllm_config

        worker: Any = self
        incoming = worker.__dict__.get("dapo_incoming") or Incoming(worker)
        worker.dapo_incoming = incoming
        try:
            with set_current_vllm_config(worker.vllm_config), torch.no_grad():
                found = getattr(incoming, step)(*args)
        except EngineError as error:
            return {"error": str(error)}
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)  # what was sent may be overwritten
        return {"found": found}


class _Place(NamedTuple):
    """Where a tensor is in vLLM's model: in these ``rows`` of ``module``'s, which are the rows ``sent`` of what is sent
    and of those the columns from ``left`` on, ``width`` of them."""

    module: Any
    attribute: str
    rows: slice
    sent: slice
    left: int
    width: int

    def columns(self, version: int) -> list[int]:
        """Those that are looked at, as numbers among the module's own."""
        return [(i * self.width // _COLUMNS + 7 * version) % self.width for i in range(_COLUMNS)]

    def sample(self, tensor: torch.Tensor, version: int) -> torch.Tensor:
        """The part of ``tensor`` that is to be found in place."""
        return _flat(tensor)[self.sent][:, [self.left + column for column in self.columns(version)]]

    def read(self, module: Any, version: int) -> Iterator[torch.Tensor]:
        """The same from ``module``, for each way in which that uses it."""
        plain, columns = getattr(module, self.attribute), self.columns(version)
        if plain.dim() == 1 + (self.width > 1):
            yield _flat(plain)[self.rows][:, columns]
        if self.attribute == "weight" and plain.device.type == "cpu" and hasattr(module, "quant_method"):
            # vLLM multiplies by a packed copy there
            one_hot = torch.nn.functional.one_hot(torch.tensor(columns), self.width).to(plain.dtype)
            yield module.quant_method.apply(module, one_hot, None).T[self.rows]


class Incoming:
    """New weights of one worker."""

    def __init__(self, worker: Any) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._worker, self._reload = worker, layerwise
        self._group: Any = None
        self._model = worker.model_runner.get_model()
        self._modules = dict(self._model.named_modules())
        self._gpt2 = worker.model_config.hf_config.model_type == "gpt2"
        self._tied = _tied(self._modules.values())
        self._open, self._version = False, -1
        self._arrived: dict[str, torch.Tensor] = {}  # some elements of each
        self._samples: dict[str, tuple[_Place, torch.Tensor]] = {}
        self._ways: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
            "files": partial(load_file, device=str(worker.device)),
            "ipc": self._from_handle,
            "group": self._from_group,
        }

    def describe(self) -> dict[str, Any]:
        """The device, to choose the way by."""
        device = self._worker.device
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return {"type": device.type, "uuid": uuid}

    # -- all weights -----------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """All are to come. Until :meth:`commit` nothing may be computed: the model has none meanwhile."""
        self._version, self._arrived, self._samples = version, {}, {}
        if self._open:  # what an update that failed has left
            self._reload.finalize_layerwise_reload(self._model, self._worker.model_config)
        self._reload.initialize_layerwise_reload(self._model)
        self._open = True

    def take(self, way: str, *args: Any) -> None:
        """Some of them. Raises EngineError: one came twice, with other values, or vLLM's model does not take it."""
        if not self._open:
            raise EngineError("weights: a tensor came before the beginning of an update")
        fresh: dict[str, torch.Tensor] = {}
        for name, tensor in self._ways[way](*args).items():
            elements = some_elements(tensor)
            if name not in self._arrived:
                fresh[name] = tensor
            elif not torch.equal(self._arrived[name], elements):
                raise EngineError(f"weights: {name} came twice, with other values")
            self._arrived[name] = elements
            if self._gpt2 and tensor.dim() == 2 and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc"):
                tensor = tensor.T  # as vLLM has it
            if (place := self._place(name, tensor)) is not None:
                self._samples[name] = place, place.sample(tensor, self._version)
        try:
            self._model.load_weights(iter(fresh.items()))
        except Exception as error:  # each model raises its own
            text = f"vLLM's {type(self._model).__name__} does not take {' or '.join(list(fresh)[:3])}"
            raise EngineError(f"weights: {text}: {type(error).__name__}: {error}") from error

    def commit(self, fingerprint: bytes) -> None:
        """All have come, and are in use when this returns.
        Raises EngineError: some are not what was sent, or not in use."""
        check_arrived(load(fingerprint), self._arrived)
        followers = [module for modules in self._tied.values() for module in modules]
        empty = [path for path, module in self._modules.items() if module not in followers and self._got_none(module)]
        if empty and self._worker.model_config.quantization is None:
            raise EngineError(
                f"weights: {len(empty)} of {len(self._modules)} modules of vLLM's model got none of what arrived, such "
                f"as {empty[0]}"
            )
        self._reload.finalize_layerwise_reload(self._model, self._worker.model_config)
        self._open = False
        for module in followers:
            if hasattr(module, "quant_method"):  # on a CPU it has a copy, which vLLM leaves as it was
                module.quant_method.process_weights_after_loading(module)
        self._check_in_place()
        self._samples = {}

    def _got_none(self, module: Any) -> bool:
        """Whether it has parameters, and waits for all of them. vLLM counts what it copies."""
        info = self._reload.get_layerwise_info(module)
        return any(p is not None and p.numel() for p in module._parameters.values()) and (
            info.can_load() and not info.load_numel
        )

    def _check_in_place(self) -> None:
        same: dict[str, bool] = {}
        for name, (place, sample) in self._samples.items():
            for module in (place.module, *self._tied.get(place.module, ())):
                where = name if module is place.module else f"the output head tied to {name}"
                for have in place.read(module, self._version):
                    want = sample.to(have.dtype)
                    agree = torch.equal(have, want) or (  # some models have their rows in another order
                        have.shape == want.shape and torch.equal(have.sort(0).values, want.sort(0).values)
                    )
                    same[where] = same.get(where, True) and agree
        if lost := [name for name, agree in same.items() if not agree]:
            raise EngineError(
                f"weights: {len(lost)} of {len(same)} parameters, such as {lost[0]}, arrived but did not reach vLLM's "
                "model, which computes with other values"
            )

    def _place(self, name: str, tensor: torch.Tensor) -> _Place | None:
        path, _, attribute = name.rpartition(".")
        module, part = _find(path, self._modules, getattr(self._model, "packed_modules_mapping", {})) or (None, 0)
        if tensor.dim() not in (1, 2) or not isinstance(getattr(module, attribute, None), torch.Tensor):
            return None
        rank, ranks = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
        rows, columns = _flat(tensor).shape
        at, height, width = 0, rows, columns
        first: int | None = 0
        if (parts := getattr(module, "output_partition_sizes", None)) is not None:
            at, height = sum(parts[:part]), parts[part]
            first = _shard(rows, height, rank, ranks)
        elif (indices := getattr(module, "shard_indices", None)) is not None:
            first, height = indices.org_vocab_start_index, indices.org_vocab_end_index - indices.org_vocab_start_index
        if tensor.dim() == 2:
            width = getattr(module, "input_size_per_partition", columns)
        left = _shard(columns, width, rank, ranks)
        if first is None or left is None:
            return None
        return _Place(module, attribute, slice(at, at + height), slice(first, first + height), left, width)

    # -- the adapter -----------------------------------------------------------------------------------------------

    def adapter(self, folder: str, fingerprint: bytes) -> None:
        """Take the adapter in ``folder`` in place of the one before.
        Raises EngineError: it is not what was sent, or is not on the layers that it is for."""
        from vllm.lora.request import LoRARequest

        sent = load(fingerprint)
        names = {file_key(name): name for name in sent}
        tensors = {
            names.get(file_key(key), key): tensor for key, tensor in load_file(Path(folder) / WEIGHTS_FILE).items()
        }
        check_arrived(sent, {name: some_elements(tensor) for name, tensor in tensors.items()})
        self._worker.remove_lora(ADAPTER[1])
        try:
            self._worker.add_lora(LoRARequest(*ADAPTER, folder))
        except Exception as error:  # the kinds differ
            raise EngineError(f"weights: vLLM does not take the adapter: {type(error).__name__}: {error}") from error
        manager = self._worker.model_runner.lora_manager._adapter_manager
        slots = manager.lora_index_to_id  # of adapters that are in use, by number
        slot = slots.index(ADAPTER[1]) if ADAPTER[1] in slots else None
        lost = [n for n, tensor in tensors.items() if slot is None or not self._bound(manager.modules, n, tensor, slot)]
        if lost:
            raise EngineError(
                f"weights: {len(lost)} of {len(tensors)} tensors of the adapter, such as {lost[0]}, arrived but are on "
                "no layer of vLLM's model, or with other values"
            )

    def _bound(self, modules: Mapping[str, Any], name: str, sent: torch.Tensor, slot: int) -> bool:
        """Whether a matrix of the adapter is where vLLM multiplies by it, which is a multiple of it (the scale)."""
        path, _, kind = name.partition(".lora_")
        found = _find(path, modules, getattr(self._model, "packed_modules_mapping", {}))
        if found is None:
            return False
        module, part = found
        stacked = (module.lora_a_stacked if kind[0] == "A" else module.lora_b_stacked)[part][slot, 0]
        have = stacked[: sent.shape[0], : sent.shape[1]].float().cpu()
        if have.shape != sent.shape:  # a part of it, with tensor parallelism
            return bool(have.any()) == bool(sent.any())
        want = sent.to(stacked.dtype).float()
        scale = (have * want).sum() / (want * want).sum().clamp(min=1e-30)
        return torch.allclose(have, scale * want, rtol=2**-6, atol=1e-30) and bool(have.any()) == bool(want.any())

    # -- the ways --------------------------------------------------------------------------------------------------

    def _from_handle(self, layout: Layout, handle: bytes) -> dict[str, torch.Tensor]:
        """From memory of the learner's on the same GPU, which it uses again when this returns."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        args = list(pickle.loads(handle))
        args[6] = self._worker.device.index  # the number of the GPU may differ between the two
        rebuild: Any = rebuild_cuda_tensor
        return unpacked(rebuild(*args).clone(), layout)

    def join(self, backend: str, where: str, size: int) -> None:
        """Be one of ``size`` in a group of processes of which the learner is the first."""
        self._group = Group(backend, where, self._worker.rank + 1, size, self._worker.device)

    def _from_group(self, layout: Layout, size: int) -> dict[str, torch.Tensor]:
        return unpacked(self._group.receive(size), layout)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """As a matrix; one of one dimension is a column."""
    return tensor.reshape(len(tensor), -1)


def _find(path: str, modules: Mapping[str, Any], packed: Mapping[str, Sequence[str]]) -> tuple[Any, int] | None:
    """The module of vLLM's that has the one of this path in Transformers' model, and as which of its parts."""
    if path in modules:
        return modules[path], 0
    parent, _, leaf = path.rpartition(".")
    for fused, parts in packed.items():
        if leaf in parts and (whole := f"{parent}.{fused}") in modules:
            return modules[whole], list(parts).index(leaf)
    return None


def _shard(total: int, part: int, rank: int, ranks: int) -> int | None:
    """Where a rank's part of so many rows or columns begins; None: they are split in a way that is not known here."""
    shards = total // part if part else 0
    if not shards or shards * part != total or ranks % shards:
        return None
    return rank // (ranks // shards) * part  # where there are more ranks than parts, some have the same


def _tied(modules: Iterable[Any]) -> dict[Any, list[Any]]:
    """Modules whose matrix is an earlier one's, by that one."""
    first: dict[int, Any] = {}
    found: dict[Any, list[Any]] = {}
    for module in modules:
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel():
            owner = first.setdefault(weight.data_ptr(), module)
            if owner is not module:
                found.setdefault(owner, []).append(module)
    return found
