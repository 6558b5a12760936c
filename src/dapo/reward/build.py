"""The :class:`~dapo.reward.contract.Scorer` of a recipe's ``reward`` section, or of a Python function.

What needs an extra or a heavy library is imported only when a recipe asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

from dapo.config import (
    CodeReward,
    ComposeReward,
    ExactReward,
    FunctionReward,
    HttpReward,
    JudgeReward,
    KServeReward,
    MathReward,
    ModelReward,
    RewardConfig,
    ServerReward,
)
from dapo.errors import RewardError, extra
from dapo.reward.contract import Scorer
from dapo.reward.exact import ExactScorer
from dapo.reward.function_scorers import CallableScorer, FunctionScorer
from dapo.reward.math.scorer import MathScorer


def make_scorer(config: RewardConfig, function: Callable[..., Any] | None = None) -> Scorer:
    """Workers start with the first score, or with ``start``. ``function``: passed from Python, replaces the recipe's
    kind; the section's time limit holds. Raises RewardError: what the kind needs is not installed."""
    if function is not None:
        return CallableScorer(function, config.timeout_s)
    match config:
        case MathReward():
            return MathScorer(config)
        case ExactReward():
            return ExactScorer(config)
        case FunctionReward():
            return FunctionScorer(config)
        case CodeReward():
            from dapo.reward.code.scorer import CodeScorer

            return CodeScorer(config)
        case ModelReward():
            from dapo.reward.model.scorer import ModelScorer

            return ModelScorer(config)
        case ServerReward() | HttpReward() | KServeReward() | JudgeReward():
            return make_client(config)
        case ComposeReward():
            from dapo.reward.compose import ComposedScorer

            return ComposedScorer(config, {name: make_scorer(one) for name, one in config.rewards.items()})
        case _:
            assert_never(config)


def make_client(config: ServerReward | HttpReward | KServeReward | JudgeReward) -> Scorer:
    """Nothing is sent before ``start`` or the first score.
    Raises RewardError: a library is missing, or the environment variable of the token is not set."""
    with extra("remote", f"reward.kind={config.kind}", RewardError):
        if isinstance(config, KServeReward):
            from dapo.reward.client.kserve import KServeScorer

            return KServeScorer(config)
        if isinstance(config, JudgeReward):
            from dapo.reward.judge.scorer import JudgeScorer

            return JudgeScorer(config)
        from dapo.reward.client.http import HttpScorer, ServerScorer

        return ServerScorer(config) if isinstance(config, ServerReward) else HttpScorer(config)


def needs_answer(config: RewardConfig) -> bool:
    """Whether every row must have a reference answer."""
    if isinstance(config, ComposeReward):
        return any(map(needs_answer, config.rewards.values()))
    return isinstance(config, MathReward | ExactReward)
