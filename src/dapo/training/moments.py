"""AdamW whose two moments rest in the host's memory, in 8 bits, or both, and are float32 on the device part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from dapo.config import TrainingConfig

PART = 2**24
"""Numbers whose moments are float32 on the device at a time: 128 MiB of them."""
BLOCK = 128
"""Numbers in 8 bits that share a scale."""
_SMALL = 4096
Part = list[tuple[torch.Tensor, slice]]
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHIFT = 20
"""Bits of a float32's mantissa that 8 bits have no room for; three are kept, which is a step of 6 to 12%."""
_ONE = 0x3F800000 >> _SHIFT
"""The 1.0 of float32 without them: what is largest in a block, and its highest code."""
_LOWEST = {True: _ONE - 127, False: _ONE - 255}
"""What code 0 stands for, by whether one of the 8 bits is a sign."""
_ZERO = 1.125 * 2**-16
"""The same as a number, which is added to a ratio before it gets a code with a sign, so that 0 has one."""


def in_8_bits(numbers: int) -> bool:
    """Whether moments of a tensor of so many numbers can be: those of norms and biases stay float32."""
    return numbers >= _SMALL and numbers % BLOCK == 0


def scales_of(numbers: int) -> int:
    """How many a tensor of so many numbers in 8 bits has."""
    return numbers // BLOCK


def moment_bytes(numbers: int, kind: str) -> int:
    """Of both moments of a tensor."""
    return 2 * numbers + 8 * scales_of(numbers) if kind == "int8" and in_8_bits(numbers) else 8 * numbers


def streamed_bytes(numbers: int, kind: str, offload: bool) -> int:
    """What a step holds on the device for a while, to have moments of so many numbers in float32 part by part."""
    return (24 if kind == "int8" else 8 * offload) * min(numbers, PART)


def make_optimizer(parameters: Iterable[torch.Tensor], config: TrainingConfig) -> torch.optim.AdamW:
    """As the settings say; those of a run without any of this are PyTorch's own."""
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.adam_epsilon}
    settings |= {"weight_decay": config.weight_decay, "fused": True}
    if config.moments == "float32" and not config.offload_optimizer:
        return torch.optim.AdamW(parameters, **settings)
    return StoredAdamW(parameters, kind=config.moments, offload=config.offload_optimizer, **settings)


class StoredAdamW(torch.optim.AdamW):
    """The numbers of ``torch.optim.AdamW``, made by its own kernel, part by part; ``int8`` rounds the moments after it.

    For parameters on CUDA that are offloaded the moments lie in pinned memory; on a CPU they stay where they are.
    ``torn``: whether a step failed after it had changed some of the parameters and not the others."""

    torn = False

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        kind: str = "float32",
        offload: bool = False,
        part: int = PART,
        **settings: Any,
    ) -> None:
        """``kind``: float32 or int8. ``part``: numbers that are worked on at a time, a multiple of ``BLOCK``."""
        super().__init__(parameters, **settings)
        self._kind, self._offload, self._part = kind, offload, part
        self._moved = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step. When it returns, the moments are where they rest; if memory ran out on the way, it is ``torn``."""
        (group,) = self.param_groups
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in moving:
            if not self.state.get(parameter):
                self.state[parameter] = self._first(parameter)
        # of steps that the state counts, so that a run that goes on rounds as one that never stopped
        noise = torch.Generator(moving[0].device if moving else "cpu").manual_seed(self._moved + 1)
        torn = self.torn
        for part in self._parts(moving):
            self._move(part, group, noise)
        if moving:
            torch._foreach_add_([self.state[parameter]["step"] for parameter in moving], 1)
        self.torn = torn
        self._moved += len(moving)
        if self._offload and noise.device.type == "cuda":
            torch.cuda.current_stream(noise.device).synchronize()  # whoever reads the moments now does so on the host

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the moments of ``state_dict``, of which nothing but ``state`` is looked at: the settings stay.

        That of ``torch.optim.AdamW`` would put all of them onto the device, and make them float32.
        """
        (group,) = self.param_groups
        for number, state in state_dict["state"].items():
            parameter = group["params"][number]
            self.state[parameter] = {name: self._at_rest(name, value, parameter) for name, value in state.items()}
        self._moved = sum(int(state["step"]) for state in state_dict["state"].values())

    def _first(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        narrow = self._kind == "int8" and in_8_bits(parameter.numel())
        made = {"step": torch.zeros(())}
        for name in _MOMENTS:
            made[name] = torch.zeros(parameter.shape, dtype=torch.uint8 if narrow else torch.float32, device="meta")
            if narrow:
                made[f"{name}_scale"] = torch.zeros(scales_of(parameter.numel()), device="meta")
        return {name: self._at_rest(name, value, parameter) for name, value in made.items()}

    def _at_rest(self, name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of ``value`` where it is between steps; zeros for one that is nowhere yet."""
        on_host = self._offload and name != "step" and parameter.is_cuda
        where: dict[str, Any] = {"pin_memory": True} if on_host else {"device": parameter.device}
        found = torch.empty(value.shape, dtype=value.dtype, **where)
        return found.zero_() if value.is_meta else found.copy_(value)

    def _parts(self, moving: list[torch.Tensor]) -> Iterator[Part]:
        """Tensors of one kind together, as far as they go into a part, and cut where blocks end. The first part is as
        large as any: if memory does not suffice, nothing has been changed yet."""
        part: Part = []
        for narrow in (True, False):
            room = self._part
            for parameter in moving:
                start, end = 0, parameter.numel()
                while start < end and narrow == (self.state[parameter]["exp_avg"].dtype == torch.uint8):
                    stop = end if end - start <= room else start + room // BLOCK * BLOCK
                    if stop > start:
                        part.append((parameter, slice(start, stop)))
                    start, room = stop, room - (stop - start)
                    if start < end:
                        yield part
                        part, room = [], self._part
            if part:
                yield part
                part = []

    def _move(self, part: Part, group: Mapping[str, Any], noise: torch.Generator) -> None:
        first, second = (_Moment(name, [(self.state[p], here) for p, here in part], noise) for name in _MOMENTS)
        self.torn = True  # up to the end of the step
        torch._fused_adamw_(
            [parameter.view(-1)[here] for parameter, here in part],
            [parameter.grad.reshape(-1)[here] for parameter, here in part],  # type: ignore[union-attr]
            first.values,
            second.values,
            [],
            torch._foreach_add([self.state[parameter]["step"] for parameter, _ in part], 1),
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        first.put_back()
        second.put_back()


class _Moment:
    """One of the two, of a part of the parameters: where it rests, and in float32 on the device.

    Tensors in 8 bits are widened and narrowed all at once, as most are too small to keep a GPU at work."""

    def __init__(
        self, name: str, states: list[tuple[Mapping[str, torch.Tensor], slice]], noise: torch.Generator
    ) -> None:
        self._signed, self._noise = name == _MOMENTS[0], noise
        self._rests = [state[name].view(-1)[here] for state, here in states]
        self._narrow = self._rests[0].dtype == torch.uint8
        self.values = [rest.to(noise.device, non_blocking=True) for rest in self._rests]
        if self._narrow:
            scales = [(state[f"{name}_scale"], here) for state, here in states]
            self._scales = [scale[here.start // BLOCK : here.stop // BLOCK] for scale, here in scales]
            found = [scale.to(noise.device, non_blocking=True) for scale in self._scales]
            self._all = decode(torch.cat(self.values), torch.cat(found), self._signed)
            self.values = list(torch.split(self._all, [rest.numel() for rest in self._rests]))

    def put_back(self) -> None:
        if self._narrow:
            codes, scales = encode(self._all, self._signed, self._noise)
            self.values = list(torch.split(codes, [rest.numel() for rest in self._rests]))
            found = torch.split(scales, [scale.numel() for scale in self._scales])
            torch._foreach_copy_(self._scales, list(found), non_blocking=True)
        if self.values[0].data_ptr() != self._rests[0].data_ptr():
            torch._foreach_copy_(self._rests, self.values, non_blocking=True)


def encode(values: torch.Tensor, signed: bool, noise: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes, scales)`` of float32 numbers: of each the leading bits of its float32, relative to the largest of its
    block, which is exact.

    Rounded up or down at random, so that it is right on average. To the nearest, a second moment with beta2 = 0.999
    would never move: a thousandth of itself is less than half a step.

    With a sign, 7 bits reach from 1 to 2^-16, then evenly down to 0. Without one, 8 bits reach down to 2^-32, the
    square of that, and what is less becomes it: a second moment of 0 would divide.
    """
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    ratio = blocks.abs().div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    if signed:
        ratio.mul_(1 - _ZERO).add_(_ZERO).clamp_(max=1.0)
    bits = ratio.view(torch.int32)
    bits += torch.empty_like(bits).random_(0, 2**_SHIFT, generator=noise)
    codes = (bits >> _SHIFT).sub_(_LOWEST[signed]).clamp_(min=0).to(torch.uint8)
    return (codes + (blocks < 0).to(torch.uint8) * 128 if signed else codes).view(-1), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The float32 numbers that :func:`encode` made ``codes`` and ``scales`` of."""
    levels = (codes & 127 if signed else codes).to(torch.int32).add_(_LOWEST[signed])
    ratio = (levels << _SHIFT).view(torch.float32)
    if signed:
        ratio = ratio.sub_(_ZERO).div_(1 - _ZERO).mul_(1 - 2 * (codes >> 7).to(torch.float32))
    return ratio.view(-1, BLOCK).mul_(scales[:, None]).view(-1)
