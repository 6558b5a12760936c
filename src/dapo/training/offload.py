"""AdamW whose two moments live in the host's memory between updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

GROUP_NUMBERS = 2**26
"""Parameters whose moments are on the device at a time: half a GiB of them, some milliseconds on the bus."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """The numbers of ``torch.optim.AdamW``, made by its own code, one group of parameters after another.

    For parameters on CUDA the moments lie in pinned memory; on a CPU they stay where they are.

    Attributes:
        torn: whether a step failed after it had changed some of the parameters and not the others.
    """

    torn = False

    def __init__(
        self, parameters: Iterable[torch.Tensor], *, group_numbers: int = GROUP_NUMBERS, **settings: Any
    ) -> None:
        """``group_numbers``: at most so many in a group; a larger tensor is a group of its own."""
        super().__init__([{"params": group} for group in _groups(parameters, group_numbers)], **settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step. When it returns, the moments are in the host's memory.

        Memory may run out between two groups, on the device or, at the first step, on the host; then it is ``torn``.
        """
        groups, begun = self.param_groups, False
        try:
            # the largest first: if memory does not suffice, nothing has been changed yet
            for group in sorted(groups, key=lambda group: -sum(p.numel() for p in group["params"])):
                hosts = {parameter: self._fetch(parameter) for parameter in group["params"]}
                self.param_groups = [group]
                super().step()
                begun = True
                for parameter, host in hosts.items():
                    self._put_back(parameter, host)
            begun = False
        finally:
            self.param_groups, self.torn = groups, self.torn or begun
        for device in {p.device for group in groups for p in group["params"] if p.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # whoever reads the moments now does so on the host

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the moments of ``state_dict``, of which nothing but ``state`` is looked at: the settings stay.

        That of ``torch.optim.AdamW`` would put all of them onto the device.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            parameter = parameters[number]
            self.state[parameter] = {
                name: _on_host(value, parameter) if name in _MOMENTS else value.to(parameter.device, copy=True)
                for name, value in state.items()
            }

    def _fetch(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Bring the moments to the parameter's device; returns those on the host, none before the first step."""
        state = self.state.get(parameter, {})
        hosts = {name: state[name] for name in _MOMENTS if name in state}
        for name, host in hosts.items():
            state[name] = host.to(parameter.device, non_blocking=True)
        return hosts

    def _put_back(self, parameter: torch.Tensor, hosts: Mapping[str, torch.Tensor]) -> None:
        state = self.state.get(parameter, {})  # empty for a parameter without a gradient
        for name in _MOMENTS:
            if name in state:
                state[name] = _on_host(state[name], parameter, hosts.get(name))


def _on_host(value: torch.Tensor, parameter: torch.Tensor, host: torch.Tensor | None = None) -> torch.Tensor:
    """``value`` in the host's memory: in ``host`` if it is given, pinned if ``parameter`` is on CUDA."""
    if not parameter.is_cuda:
        return value
    if host is None:
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _groups(parameters: Iterable[torch.Tensor], numbers: int) -> Iterator[list[torch.Tensor]]:
    """In their order, cut where a group would grow beyond ``numbers``."""
    group: list[torch.Tensor] = []
    for parameter in parameters:
        if group and sum(p.numel() for p in group) + parameter.numel() > numbers:
            yield group
            group = []
        group.append(parameter)
    if group:
        yield group
