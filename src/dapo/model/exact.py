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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CPU_ROWS = 32
CPU_MULTIPLE = 16
"""A product on a CPU has so many rows each time, filled up with zeros, and its other sizes are a multiple of 16: with
few columns, or with rows that begin at odd addresses, a library computes one row of 32 otherwise than the next."""

_local = threading.local()
_lock = threading.Lock()
_library: Any = None  # of the operations replaced; there once anything was exact in this process
_inside = 0  # threads that are


def active() -> bool:
    """Whether this thread is inside of :func:`row_invariant`."""
    return getattr(_local, "active", False)


def in_use() -> bool:
    """Whether any thread is: then settings of the process that change products have to stay as they are."""
    return _inside > 0


@contextmanager
def row_invariant(on: bool = True) -> Iterator[None]:
    """Inside, in this thread, results of a row depend on nothing but the row. Not ``on``: nothing happens."""
    if not on or active():
        yield
        return
    _replace_operations()
    _count(1)
    _local.active = True
    try:
        yield
    finally:
        _local.active = False
        _count(-1)


def _count(threads: int) -> None:
    global _inside
    with _lock:
        _inside += threads


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
        products: dict[str, Callable[..., Tensor]] = {"mm": _product, "addmm": _product_and_bias}
        devices = {"CPU": products | {"silu": _silu, "gelu": _gelu}}
        if torch.cuda.is_available():
            devices["CUDA"] = products | {"mm.dtype": _product, "mean.dim": _mean}
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch tells of the first operation that is replaced
            for device, operations in devices.items():
                for name, ours in operations.items():
                    library.impl(name, _where_asked(name, ours), device)
        _library = library


def _where_asked(name: str, ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    packet, _, overload = name.partition(".")
    # with an argument for the result it is an operation of its own, which is not replaced
    plain = getattr(getattr(torch.ops.aten, packet), "dtype_out" if overload == "dtype" else "out")

    def operation(*args: Any, **kwargs: Any) -> Any:
        if active():
            return ours(*args, **kwargs)
        dtype = args[2] if overload == "dtype" else kwargs.get("dtype") or args[0].dtype
        shape = (len(args[0]), args[1].shape[1]) if overload == "dtype" else (0,)  # that one does not resize
        return plain(*args, **kwargs, out=args[0].new_empty(shape, dtype=dtype))

    # compiled code, which is for GPUs, may call it, and is not to compile it; to load the compiler takes seconds
    disable: Any = torch.compiler.disable
    return disable(operation) if torch.cuda.is_available() else operation


def _product(left: Tensor, right: Tensor, dtype: torch.dtype | None = None, bias: Tensor | None = None) -> Tensor:
    if left.is_cuda:
        from dapo.model.exact_kernels import product  # needs Triton

        return product(left, right, bias, dtype or left.dtype)
    rows, (depth, columns) = len(left), right.shape
    deeper, wider, weight = -depth % CPU_MULTIPLE, -columns % CPU_MULTIPLE, right.t()
    if deeper or wider or not weight.is_contiguous():
        weight = F.pad(weight, (0, deeper, 0, wider)).contiguous()
    padded = F.pad(left, (0, deeper, 0, -rows % CPU_ROWS)).contiguous()
    aten = torch.ops.aten
    how, given = (aten.mm, ()) if bias is None else (aten.addmm, (F.pad(bias, (0, wider)),))
    out = left.new_empty(len(padded), columns + wider)
    for start in range(0, rows, CPU_ROWS):
        some = slice(start, start + CPU_ROWS)
        how.out(*given, padded[some], weight.t(), out=out[some])
    return out[:rows, :columns].contiguous()


def _product_and_bias(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta != 1 or alpha != 1 or bias.dim() != 1:
        raise RuntimeError("runtime.exact: of sums with a product those of linear layers alone are known")
    return _product(left, right, bias=bias)


def _mean(values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dim is None or [d % values.dim() for d in dim] != [values.dim() - 1] or dtype not in (None, values.dtype):
        raise RuntimeError("runtime.exact: of means those over the last dimension alone are known")
    from dapo.model.exact_kernels import row_means  # needs Triton

    means = row_means(values)
    return means.unsqueeze(-1) if keepdim else means


# On a CPU the last numbers of a tensor, which fill no vector of the processor, get these functions by other code than
# the rest, with other bits. What they are composed of here has no such rest.


def _silu(values: Tensor) -> Tensor:
    x = values.float()
    return (x / (1 + torch.exp(-x))).to(values.dtype)


def _gelu(values: Tensor, *, approximate: str = "none") -> Tensor:
    x = values.float()
    if approximate == "tanh":
        inner = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    else:
        inner = torch.erf(x * math.sqrt(0.5))
    return (0.5 * x * (1 + inner)).to(values.dtype)
