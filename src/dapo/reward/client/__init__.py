"""Rewards that other programs serve: ``dapo reward-server``, plain HTTP services, KServe V2."""
