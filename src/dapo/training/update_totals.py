"""What one update adds up over its micro-batches: sums, and seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dapo.training.micro_batch import MicroBatch
from dapo.training.parallel.ranks import Ranks
from dapo.training.update_report import Mismatch


@dataclass(slots=True)
class Totals:
    """Sums over the micro-batches of one update, in float64 and left on the device until the end."""

    loss: torch.Tensor
    statistics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    mismatch: Mismatch = field(default_factory=Mismatch)
    micro_batches: int = 0
    computed_tokens: int = 0
    bad_logprobs: torch.Tensor | int = 0
    """Loss tokens whose log-probability is not finite."""
    seen: list[tuple[MicroBatch, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Each micro-batch, with log-probs and entropies of its response tokens."""

    def add(
        self,
        loss: torch.Tensor,
        statistics: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        bad_logprobs: torch.Tensor,
    ) -> None:
        """One chunk of tokens: its part of the loss, name -> (sum, count), and how many log-probs are not finite."""
        self.loss = self.loss + loss.double()
        self.bad_logprobs = self.bad_logprobs + bad_logprobs
        for name, (total, count) in statistics.items():
            old_total, old_count = self.statistics.get(name, (0.0, 0.0))
            self.statistics[name] = (old_total + total, old_count + count)

    def join(self, ranks: Ranks) -> None:
        """Put the sums over all ranks, the same ones on each, in the place of this one's."""
        if ranks.size == 1:
            return
        statistics = {name: (float(total), float(count)) for name, (total, count) in self.statistics.items()}
        sizes = (self.micro_batches, self.computed_tokens)
        every = ranks.gather((float(self.loss), int(self.bad_logprobs), statistics, self.mismatch, sizes))
        self.loss, self.bad_logprobs, self.statistics = torch.zeros_like(self.loss), 0, {}
        for loss, bad, part, *_ in every:
            self.add(self.loss.new_tensor(loss), part, self.loss.new_tensor(bad))  # type: ignore[arg-type]
        self.mismatch = sum((mismatch for *_, mismatch, _ in every), Mismatch())
        self.micro_batches, self.computed_tokens = (sum(n) for n in zip(*(s for *_, s in every), strict=True))

    def tokens(self, count: int, ranks: Ranks) -> tuple[Any, Any] | None:
        """Log-probs (float32) and entropies (float16), ``[count]`` each, on the host by one copy; None: none were seen.

        Every response token was seen by one of the ranks.
        """
        if not self.micro_batches:
            return None
        found = torch.zeros((2, count), device=self.loss.device)
        if self.seen:
            parts, *values = zip(*self.seen, strict=True)
            found[:, torch.cat([part.index for part in parts])] = torch.stack([*map(torch.cat, values)]).float()
        ranks.add_up(found)
        logprobs, entropy = found.cpu()
        return logprobs.numpy(), entropy.half().numpy()


class PhaseClock:
    """Seconds by phase. CUDA works behind the program's back: there they are the GPU's, which puts marks in its queue.

    Waiting for it at each border would leave it idle until it is given work again.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._device = device

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure what is inside of the block."""
        if self._device.type == "cuda":
            event: Any = torch.cuda.Event  # untyped in torch
            first, last = event(enable_timing=True), event(enable_timing=True)
            first.record(torch.cuda.current_stream(self._device))
            yield
            last.record(torch.cuda.current_stream(self._device))
            self._marks.append((phase, first, last))
        else:
            start = time.perf_counter()
            yield
            self._host[phase] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """What is measured so far, waited for."""
        found = dict(self._host)
        if self._marks:
            torch.cuda.synchronize(self._device)
        for phase, first, last in self._marks:
            found[phase] += first.elapsed_time(last) / 1000
        return found
