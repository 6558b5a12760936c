"""Each method as its recipe has it, from rewards to the gradient, against the formulas of its paper in float64 with
autograd, response by response. Value and gradient to 1e-5, off policy, so that clips are met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo.algorithm.kin import OBJECTIVES
from dapo.config import Config, load_config
from dapo.orchestrator.batch_builder import BatchBuilder
from dapo.records import Group, Prompt, Reward, Sample
from dapo.training.learner import objective_inputs
from dapo.training.micro_batch import select_tokens

FOLDER = Path(__file__).parents[2] / "recipes/method"
GROUPS, SIZE, L_MAX = 4, 3, 48


@dataclass
class Response:
    """Of one prompt's ``group``: log-probs ``[n]`` of the policy that sampled it and of the reference, values of the
    critic, and the log-probs that the gradient is by."""

    group: int
    reward: float
    old: Tensor
    reference: Tensor
    values: Tensor
    now: Tensor


def _responses(seed: int, size: int) -> list[Response]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(GROUPS * size):
        old, noise, apart, values = (torch.from_numpy(rng.normal(0, 1, n)) for n in [int(rng.integers(1, 9))] * 4)
        old = (old - 3).float().double()
        reference, values = ((old + apart / 2).float().double(), values.float().double())
        now = (old + 0.9 * noise).float().double().requires_grad_()
        found.append(Response(i // size, round(float(rng.normal()), 2), old, reference, values, now))
    return found


def _siblings(one: Response, rollout: list[Response]) -> Tensor:
    return torch.tensor([r.reward for r in rollout if r.group == one.group], dtype=torch.float64)


def _clipped(ratio: Tensor, a: Any, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def _token_mean(values: list[Tensor]) -> Tensor:
    return torch.cat(values).mean()


def _grpo(mini: list[Response], rollout: list[Response]) -> Tensor:
    """arXiv 2402.03300, Eq. 3 and 4; beta 0.04."""

    def loss(r: Response) -> Tensor:
        of, d = _siblings(r, rollout), r.reference - r.now
        a = (r.reward - of.mean()) / (of.std() + 1e-6)
        return (_clipped((r.now - r.old).exp(), a, 0.2, 0.2) + 0.04 * (d.exp() - d - 1)).mean()

    return _mean([loss(r) for r in mini])


def _dr_grpo(mini: list[Response], rollout: list[Response]) -> Tensor:
    """arXiv 2503.20783: no deviation, no length; over the longest response that there may be."""
    losses = [
        _clipped((r.now - r.old).exp(), r.reward - _siblings(r, rollout).mean(), 0.2, 0.2).sum() / L_MAX for r in mini
    ]
    return _mean(losses)


def _rloo(mini: list[Response], rollout: list[Response]) -> Tensor:
    """arXiv 2402.14740: the KL is in the reward, the baseline is the mean of the others."""
    paid = {id(r): r.reward - 0.03 * float((r.old - r.reference).sum()) for r in rollout}

    def loss(r: Response) -> Tensor:
        others = [paid[id(s)] for s in rollout if s.group == r.group and s is not r]
        a = paid[id(r)] - sum(others) / len(others)
        return _clipped((r.now - r.old).exp(), a, 0.2, 0.28).sum()

    return _mean([loss(r) for r in mini])


def _reinforce_pp(mini: list[Response], rollout: list[Response]) -> Tensor:
    """arXiv 2501.03262, with a baseline: group mean, then all tokens of the rollout; k2 in the loss."""
    raw = {id(r): r.reward - _siblings(r, rollout).mean() for r in rollout}
    tokens = torch.cat([raw[id(r)].repeat(len(r.old)) for r in rollout])

    def loss(r: Response) -> Tensor:
        a = (raw[id(r)] - tokens.mean()) / (tokens.std() + 1e-6)
        return _clipped((r.now - r.old).exp(), a, 0.2, 0.2) + 0.001 * (r.now - r.reference) ** 2 / 2

    return _token_mean([loss(r) for r in mini])


def _gspo(mini: list[Response], rollout: list[Response]) -> Tensor:
    """arXiv 2507.18071, Eq. 5 to 7."""

    def loss(r: Response) -> Tensor:
        of = _siblings(r, rollout)
        return _clipped((r.now - r.old).mean().exp(), (r.reward - of.mean()) / (of.std() + 1e-6), 3e-4, 4e-4)

    return _mean([loss(r) for r in mini])


def _cispo(mini: list[Response], rollout: list[Response]) -> Tensor:
    """arXiv 2506.13585, Eq. 4 and 5: no lower border."""

    def loss(r: Response) -> Tensor:
        of = _siblings(r, rollout)
        a = (r.reward - of.mean()) / (of.std() + 1e-6)
        return -(r.now - r.old).exp().clamp(max=5.0).detach() * a * r.now

    return _token_mean([loss(r) for r in mini])


def _ppo(mini: list[Response], rollout: list[Response]) -> Tensor:
    """arXiv 1707.06347, Eq. 7 and 11; gamma and lambda 1, whitened."""
    raw = {id(r): r.reward - r.values for r in rollout}
    tokens = torch.cat(list(raw.values()))
    scaled = {key: (a - tokens.mean()) / (tokens.std() + 1e-6) for key, a in raw.items()}
    return _token_mean([_clipped((r.now - r.old).exp(), scaled[id(r)], 0.2, 0.2) for r in mini])


METHODS: dict[str, Callable[[list[Response], list[Response]], Tensor]] = {
    "grpo": _grpo,
    "dr-grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce-pp": _reinforce_pp,
    "gspo": _gspo,
    "cispo": _cispo,
    "ppo": _ppo,
}


def _groups(rollout: list[Response]) -> list[Group]:
    def sample(index: int, r: Response) -> Sample:
        n, logprobs = len(r.old), r.old.numpy().astype(np.float32)
        arrays = np.arange(n, dtype=np.int32), logprobs, np.zeros(n, np.int32)
        return Sample(r.group, index, *arrays, "stop", reward=Reward(r.reward > 0, r.reward))

    rows = [[r for r in rollout if r.group == g] for g in range(GROUPS)]
    return [Group(g, Prompt(g, "", (1,)), tuple(sample(i, r) for i, r in enumerate(row))) for g, row in enumerate(rows)]


def _ours(rollout: list[Response], config: Config, cut: int) -> list[tuple[float, Tensor]]:
    """Loss and gradient of each mini-batch, in ``cut`` parts of whole responses."""
    builder, groups = BatchBuilder(config), _groups(rollout)
    names = ("reference", "values", "now")
    columns = {name: torch.cat([getattr(r, name).detach() for r in rollout]).float().numpy() for name in names}
    batch = builder.build(groups)
    _, batch = builder.finish(groups, batch.with_columns(**columns, after=columns["values"]))
    a, found = config.algorithm, []
    objective = OBJECTIVES[a.objective](
        a.clip_ratio_low, a.clip_ratio_high, a.clip_ratio_c, builder.kl.coef, a.kl.estimator, a.kl.mode == "loss"
    )
    for _, mini in builder.minibatches(batch):
        inputs = objective_inputs(mini, a, L_MAX, torch.device("cpu"))
        logprobs = torch.from_numpy(mini.columns["now"]).requires_grad_()
        total = torch.zeros(())
        for part in np.array_split(np.random.default_rng(0).permutation(mini.num_samples), cut):
            index = torch.from_numpy(mini.response_index(part))
            total = total + objective(logprobs[index], torch.zeros(len(index)), select_tokens(inputs, index))[0]
        found.append((float(total.detach()), torch.autograd.grad(total, logprobs)[0].double()))
    return found


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", METHODS)
def test_value_and_gradient(name: str, seed: int, cut: int) -> None:
    size = 1 if name == "ppo" else SIZE
    per_update = GROUPS // min(load_config(FOLDER / f"{name}.yaml").updates_per_step, 2)
    sizes = [f"rollout.prompts_per_step={GROUPS}", f"training.groups_per_update={per_update}"]
    config = load_config(FOLDER / f"{name}.yaml", sizes)
    assert config.rollout.max_response_length == L_MAX
    rollout = _responses(seed, size)
    found = _ours(rollout, config, cut)
    assert len(found) == GROUPS // per_update
    for number, (loss, gradient) in enumerate(found):
        mini = [r for r in rollout if r.group // per_update == number]
        expected = METHODS[name](mini, rollout)
        slopes = torch.cat(torch.autograd.grad(expected, [r.now for r in mini]))
        assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
        assert slopes.abs().max() > 1e-3
        torch.testing.assert_close(gradient, slopes, atol=1e-5, rtol=0)
