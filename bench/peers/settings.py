"""The best settings of peers that were found, in settings.json: ``search`` writes them, ``compare`` and ``all.py`` read
them. An entry is of a peer, a card and a work, with all that was tried there: its speed, or null where it failed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from runner import Side, console, measure_card


class Peer(NamedTuple):
    """What its settings are searched for, and the packages whose versions matter then."""

    name: str
    unit: str
    packages: tuple[str, ...]


VLLM = Peer("vLLM", "tokens/s", ("torch", "vllm"))
TRL = Peer("TRL", "cycles/s", ("torch", "trl", "vllm"))


def read(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def search(options: argparse.Namespace, peer: Peer, work: str, measure: Callable[[str], Side]) -> dict[str, list[Side]]:
    """The peer in each setting of ``--search``, which is written down at once, beside what was tried before."""
    sides, card = [], measure_card(options)
    for setting in options.search:
        sides.append(measure(setting))
        versions = (sides[-1]["machine"] or {}).get("versions", {})
        place = {"peer": peer.name, "card": card.device if card else "?", "work": work}
        place["versions"] = {name: versions[name] for name in peer.packages if name in versions}
        entries = read(options.settings)
        before = [entry for entry in entries if place.items() <= entry.items()]
        tried = {s: speed for entry in before for s, speed in entry["tried"].items()} | {setting: sides[-1]["speed"]}
        best = max(filter(tried.get, tried), key=tried.__getitem__, default=None)
        new = place | {"date": date.today().isoformat(), "setting": best, "unit": peer.unit, "tried": tried}
        kept = [entry for entry in entries if entry not in before]
        options.settings.write_text(json.dumps([*kept, new], indent=1) + "\n", encoding="utf-8")
    return {"sides": sides}


def best(options: argparse.Namespace, peer: Peer, work: str) -> str | None:
    """``--best``, or the best setting kept: for this very work, or else for this card, or else for another GPU; on a
    CPU, where there is little to search, the defaults."""
    if options.best:
        return str(options.best)
    card = measure_card(options)
    fit = [e for e in read(options.settings) if e["peer"] == peer.name and e["setting"]]
    fit = [e for e in fit if (e["card"] == "CPU") == (options.device == "cpu")]
    found = max(fit, key=lambda e: (card and e["card"] == card.device, e["work"] == work, e["date"]), default=None)
    if found:
        where = f"{found['card']}, {found['date']}, {found['work']}, {len(found['tried'])} tried"
        console.print(f"{peer.name}: {found['setting']}, the best found ({where})", markup=False, highlight=False)
        return str(found["setting"])
    if options.device == "cpu":
        return "defaults"
    console.print(f"{options.settings} has no setting of {peer.name}: run search first, or name --best", markup=False)
    return None
