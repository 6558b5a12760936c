"""GPUs and models by name: clusters such as 8x8xH100, rates as measured, shapes as published."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from dapo.config import Config
from dapo.config.placement import bundles
from dapo.config.stages import StageConfig
from dapo.errors import ConfigError, ModelError
from dapo.orchestrator.mfu import CARDS, Card

NETWORK = 50e9
"""Bytes a second of a GPU's share of the network between hosts, in each direction: 400 Gbit/s. Assumed."""


@dataclass(frozen=True, slots=True)
class Cluster:
    hosts: int
    gpus: int
    name: str

    @property
    def card(self) -> Card:
        return CARDS[self.name]

    @property
    def total(self) -> int:
        return self.hosts * self.gpus

    def exchange(self, size: float) -> float:
        """Seconds until every GPU has ``size`` bytes of which each has a share, or has its share of their sum."""
        inside = size * (1 - 1 / self.gpus) / self.card.link
        return max(inside, size * (1 - 1 / self.hosts) / (self.gpus * NETWORK))


def read_cluster(text: str) -> Cluster:
    """``H200``, ``8xH100`` (one host) or ``8x8xH100`` (hosts, GPUs of each). Raises ConfigError for anything else."""
    found = re.fullmatch(r"(?:([1-9]\d{0,3})x)?(?:([1-9]\d{0,2})x)?([A-Za-z].*)", text.strip().replace("*", "x"))
    names = {_plain(name): name for name in CARDS}
    name = names.get(_plain(found[3])) if found else None
    if found is None or name is None:
        known = ", ".join(name.replace(" ", "-") for name in CARDS)
        raise ConfigError(f"--cluster {text!r}: give hosts x GPUs x card, such as 8x8xH100 or H200; known: {known}")
    first, second = int(found[1] or 1), int(found[2] or 1)
    return Cluster(first, second, name) if found[2] else Cluster(1, first, name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _table(name: str) -> Any:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


def rates_for(card: str) -> list[dict[str, Any]]:
    """What was measured on a card (rates.json, which ``python bench/rates.py`` writes), or where nothing was on the
    first one that has some."""
    rows = _table("rates")
    measured = card if any(row["card"] == card for row in rows) else rows[0]["card"]
    return [row for row in rows if row["card"] == measured]


def published_shape(name: str) -> tuple[str, Any]:
    """Name and config of a published model, by its name (``Qwen/Qwen2.5-Coder-7B-Instruct``) or size alone (``7B``).
    Raises ModelError: there is none in the table."""
    from transformers import AutoConfig

    for known, sizes in _table("shapes").items():
        family, _, size = known.rpartition("-")
        if re.search(rf"(?i)({re.escape(family)}\b.*-|^){re.escape(size)}\b", Path(name).name):
            return known, AutoConfig.for_model(**sizes)
    raise ModelError(
        f"model {name}: is neither here nor in the table of published shapes; give as model.path a folder with its "
        f"config.json, a size such as 7B, or one of {', '.join(_table('shapes'))}"
    )


# --- what a recipe asks for -------------------------------------------------------------------------------------------


def apart(config: Any) -> bool:
    if isinstance(config, StageConfig):
        return False
    if config.runtime.kind == "ray":
        return bool(config.runtime.placement == "disaggregated")
    return config.rollout.device not in (None, "cuda", "cuda:0")


def gpus_asked(config: Config) -> dict[str, float]:
    """By role, of a recipe that says so; empty: it takes all that there are."""
    if config.runtime.kind == "ray":
        found: dict[str, float] = {}
        for bundle in bundles(config, gpus=True):
            found[bundle.role] = found.get(bundle.role, 0.0) + bundle.gpus
        return found
    return {"learner": 1, "engine": config.rollout.tensor_parallel} if apart(config) else {}


def cluster_of(config: Config, card: str = "H200") -> str:
    """What a recipe asks for: so many GPUs of one host, or whole hosts of 8."""
    count = ceil(sum(gpus_asked(config).values())) or 1
    return f"{count}x{card}" if count <= 8 else f"{ceil(count / 8)}x8x{card}"
