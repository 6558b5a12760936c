"""Rewards that other programs serve: ``dapo reward-server``, plain HTTP services, KServe V2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dapo.config import HttpReward, KServeReward, ServerReward
from dapo.errors import RewardError, install
from dapo.reward.contract import Scorer


def make_client(config: ServerReward | HttpReward | KServeReward) -> Scorer:
    """Nothing is sent before ``start`` or the first score.
    Raises RewardError: a library is missing, or the environment variable of the token is not set."""
    with extra("kserve" if isinstance(config, KServeReward) else "remote", config.kind):
        if isinstance(config, KServeReward):
            from dapo.reward.client.kserve import KServeScorer

            return KServeScorer(config)
        from dapo.reward.client.http import HttpScorer, ServerScorer

        return ServerScorer(config) if isinstance(config, ServerReward) else HttpScorer(config)


@contextmanager
def extra(name: str, kind: str) -> Iterator[None]:
    """Around imports that need the extra ``name``. Raises RewardError: it is not installed."""
    try:
        yield
    except ImportError as error:
        raise RewardError(f"reward.kind={kind} needs {error.name}, which is not installed: {install(name)}") from None
