"""Forward passes in which the bits of a row depend on that row and the weights alone (``runtime.exact``).

A library's matrix product adds up in another order for 8 rows than for 4,000, and so do some sums over a row. Inside of
:func:`row_invariant` these few operations of PyTorch are replaced, beneath autograd, by ones of a fixed order: every
model is served as it is, and the engine's decoding step gives the bits of the trainer's packed pass. Backward passes
run outside of it. What attends is :mod:`dapo.rollout.native.exact`.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CPU_ROWS = 32
"""Rows of a product on a CPU: its library is called with this number of them, the last ones filled up with zeros."""

_local = threading.local()
_lock = threading.Lock()
_library: Any = None  # of the operations replaced; there once anything was exact in this process


def active() -> bool:
    """Whether this thread is inside of :func:`row_invariant`."""
    return getattr(_local, "active", False)


def in_use() -> bool:
    """Whether anything of this process was: settings of the process that change products have to stay as they are."""
    return _library is not None


@contextmanager
def row_invariant(on: bool = True) -> Iterator[None]:
    """Inside, in this thread, results of a row depend on nothing but the row. Not ``on``: nothing happens."""
    if on:
        _replace_operations()
    outer, _local.active = active(), on or active()
    try:
        yield
    finally:
        _local.active = outer


@contextmanager
def rounded_parameters(model: Any, dtype: torch.dtype, on: bool = True) -> Iterator[None]:
    """Inside, ``model`` computes with its parameters rounded to ``dtype``, as an engine holds them; gradients reach the
    parameters themselves. Not ``on``: nothing happens. For the one thread that computes with the model."""
    wide = [place for place in _places(model) if place[2].dtype != dtype] if on else []
    narrow = {id(parameter): parameter.to(dtype) for _, _, parameter in wide}  # tied ones once
    with _exchanged([(held, name, narrow[id(parameter)]) for held, name, parameter in wide]):
        yield


def parameters_of_now(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Inside of what it returns, to be called later, ``module`` has the rounded parameters that it has now, if any."""
    rounded = [place for place in _places(module) if not isinstance(place[2], nn.Parameter)]
    return lambda: _exchanged(rounded)


_Places = list[tuple[Any, str, Tensor]]  # of parameters: the module's dictionary, the name in it, and what is there


def _places(module: nn.Module) -> _Places:
    every = ((one._parameters, name, p) for one in module.modules() for name, p in one._parameters.items())
    return [(held, name, p) for held, name, p in every if p is not None]


@contextmanager
def _exchanged(places: _Places) -> Iterator[None]:
    before = [(held, name, held[name]) for held, name, _ in places]
    for held, name, tensor in places:
        held[name] = tensor
    try:
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def _replace_operations() -> None:
    """Once in a process. Threads outside of :func:`row_invariant` get what they always got."""
    global _library
    with _lock:
        if _library is not None:
            return
        library: Any = torch.library.Library("aten", "IMPL")
        ours: dict[str, Callable[..., Tensor]] = {"mm": _mm, "addmm": _addmm}
        devices = {"CPU": ours | {"silu": _silu, "gelu": _gelu}}
        if torch.cuda.is_available():
            devices["CUDA"] = ours | {"mm.dtype": _mm_wide, "mean.dim": _mean}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch tells of the first operation that is replaced
            for device, operations in devices.items():
                for name, operation in operations.items():
                    library.impl(name, operation, device)
        _library = library


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if not active():
        return _out("mm", left, left, right)
    return _by_kernel(left, right) if left.is_cuda else _by_blocks(torch.ops.aten.mm.out, left, right)


def _mm_wide(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    if not active():
        out = torch.empty(len(left), right.shape[1], dtype=out_dtype, device=left.device)
        return torch.ops.aten.mm.dtype_out(left, right, out_dtype, out=out)  # type: ignore[no-any-return]
    return _by_kernel(left, right, dtype=out_dtype)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not active():
        return _out("addmm", left, bias, left, right, beta=beta, alpha=alpha)
    if beta != 1 or alpha != 1 or bias.dim() != 1:
        raise RuntimeError("runtime.exact knows sums with a product in linear layers only")
    if left.is_cuda:
        return _by_kernel(left, right, bias)

    def with_bias(rows: Tensor, right: Tensor, *, out: Tensor) -> None:
        torch.ops.aten.addmm.out(bias, rows, right, out=out)

    return _by_blocks(with_bias, left, right)


def _by_kernel(left: Tensor, right: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    from dapo.model.exact_kernels import product  # needs Triton

    return product(left, right, bias, dtype or left.dtype)


def _by_blocks(operation: Any, left: Tensor, right: Tensor) -> Tensor:
    """``operation`` on :data:`CPU_ROWS` rows at a time."""
    rows = len(left)
    padded = left.new_zeros(-(-rows // CPU_ROWS) * CPU_ROWS, left.shape[1])
    padded[:rows] = left
    out = left.new_empty(len(padded), right.shape[1])
    for some, result in zip(padded.split(CPU_ROWS), out.split(CPU_ROWS), strict=True):
        operation(some, right, out=result)
    return out[:rows]


def _mean(values: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    last = dim is not None and [d % values.dim() for d in dim] == [values.dim() - 1]
    if not active():
        return _out("mean", values, values, dim, keepdim, dtype=dtype)
    if not last or dtype not in (None, values.dtype):
        raise RuntimeError("runtime.exact knows means over the last dimension only")
    from dapo.model.exact_kernels import row_means  # needs Triton

    means = row_means(values)
    return means.unsqueeze(-1) if keepdim else means


# The last numbers of a tensor, which fill no vector of the processor, go through other functions than the rest. Those
# that are composed here from an exponential have no such rest.


def _silu(values: Tensor) -> Tensor:
    if not active():
        return _out("silu", values, values)
    x = values.float()
    return (x / (1 + torch.exp(-x))).to(values.dtype)


def _gelu(values: Tensor, *, approximate: str = "none") -> Tensor:
    if not active():
        return _out("gelu", values, values, approximate=approximate)
    x = values.float()
    if approximate == "tanh":
        inner = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    else:
        inner = torch.erf(x * math.sqrt(0.5))
    return (0.5 * x * (1 + inner)).to(values.dtype)


def _out(name: str, like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What PyTorch computes: the form with ``out`` is an operation of its own, which is not replaced."""
    dtype = kwargs.get("dtype") or like.dtype
    return getattr(torch.ops.aten, name).out(*args, **kwargs, out=like.new_empty(0, dtype=dtype))  # type: ignore[no-any-return]
