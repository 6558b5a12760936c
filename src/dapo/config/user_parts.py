"""What a recipe names of the user's own, beside rewards: ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

from typing import Any

from dapo.config.tree import Config
from dapo.util.user_code import load_named


def own_parts(config: Config) -> dict[str, str]:
    """By key; those that the package has are left out."""
    named = {
        "algorithm.objective": config.algorithm.objective,
        "algorithm.advantage.kind": config.algorithm.advantage.kind,
        "data.source": config.data.source or "",
        "environment.name": config.environment.name or "",
        "environment.agent": config.environment.agent or "",
        "rollout.engine": config.rollout.engine,
        **{f"run.trackers.{place}": name for place, name in enumerate(config.run.trackers)},
        **{f"evaluation.metrics.{metric}": name for metric, name in config.evaluation.metrics.items()},
    }
    return {key: name for key, name in named.items() if ":" in name}


def own_part(config: Config, key: str, given: Any = None) -> Any:
    """``given`` from Python, or what ``config`` names under ``key``; None: neither.
    Raises ConfigError: it cannot be loaded."""
    name = own_parts(config).get(key)
    return load_named(name, key) if given is None and name else given


def own_metrics(config: Config, given: Any = None) -> dict[str, Any]:
    """The functions of ``evaluation.metrics`` by name, and those of ``given`` from Python."""
    return {name: own_part(config, f"evaluation.metrics.{name}") for name in config.evaluation.metrics} | (given or {})
