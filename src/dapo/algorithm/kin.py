"""The kin of DAPO's loss, and the table of all: a method is what it compares, and what it does where it clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dapo.algorithm.objective import DapoObjective, TokenInputs, per_unit, policy_ratio


@dataclass(frozen=True, slots=True)
class GspoObjective(DapoObjective):
    """GSPO (arXiv 2507.18071, Eq. 5 and 7): s = exp(mean over the loss tokens of log pi_theta - log pi_prox) of a whole
    response stands in the place of each token's ratio. The clip shares are those of tokens in clipped responses."""

    unit: ClassVar[Literal["sequence"]] = "sequence"

    def compared(self, logprobs: Tensor, known: TokenInputs) -> tuple[Tensor, Tensor]:
        sample, tokens = per_unit(known.mask.to(logprobs.dtype), known.sample_ids)
        ratios = torch.where(known.mask, logprobs - known.proximal_logprobs, 0)
        _, total = per_unit(ratios, known.sample_ids)
        found = (total / tokens.clamp(min=1))[sample]
        return found, torch.zeros_like(found)


@dataclass(frozen=True, slots=True)
class CispoObjective(DapoObjective):
    """CISPO (arXiv 2506.13585, Eq. 4): -w sg(clip(r, 1 - low, 1 + high)) A log pi_theta. The weight is clipped,
    whatever the sign of A, and not the token: it keeps its gradient. There is no dual clip."""

    clips_both_ways: ClassVar[bool] = True

    def policy_losses(self, logprobs: Tensor, known: TokenInputs) -> Tensor:
        ratio = policy_ratio(*self.compared(logprobs, known)).detach()
        weight = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        return -known.importance.detach() * weight * known.advantages * logprobs


OBJECTIVES: dict[str, type[DapoObjective]] = {"dapo": DapoObjective, "gspo": GspoObjective, "cispo": CispoObjective}
