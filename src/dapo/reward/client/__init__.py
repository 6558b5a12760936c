"""Rewards that other programs serve: ``dapo reward-server``, plain HTTP services, KServe V2."""

from __future__ import annotations

from dapo.config import HttpReward, KServeReward, ServerReward
from dapo.errors import RewardError, extra
from dapo.reward.contract import Scorer


def make_client(config: ServerReward | HttpReward | KServeReward) -> Scorer:
    """Nothing is sent before ``start`` or the first score.
    Raises RewardError: a library is missing, or the environment variable of the token is not set."""
    name = "kserve" if isinstance(config, KServeReward) else "remote"
    with extra(name, f"reward.kind={config.kind}", RewardError):
        if isinstance(config, KServeReward):
            from dapo.reward.client.kserve import KServeScorer

            return KServeScorer(config)
        from dapo.reward.client.http import HttpScorer, ServerScorer

        return ServerScorer(config) if isinstance(config, ServerReward) else HttpScorer(config)
