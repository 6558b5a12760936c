"""What a check found: a record that knows nothing of how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dapo.errors import ConfigError, DataError, ModelError, RewardError, UserError
from dapo.util.terminal import visible

Status = Literal["pass", "warn", "fail", "skip"]
Area = Literal["recipe", "data", "model", "reward", "machine"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    ``name``: of what was looked at, the same on every machine. ``found``: what was found there. ``fix``: what to do, a
    command or a key with a value that works; empty where there is nothing to do. ``status`` skip: it could not be
    looked at, which is neither good nor bad."""

    area: Area
    name: str
    status: Status
    found: str
    fix: str = ""

    def line(self) -> str:
        return visible(f"{self.status:<4}  {self.name}: {self.found}" + (f"; to do: {self.fix}" if self.fix else ""))


def area_of(error: UserError, otherwise: Area) -> Area:
    kinds: tuple[tuple[type[UserError], Area], ...] = (
        *((ConfigError, "recipe"), (DataError, "data"), (ModelError, "model"), (RewardError, "reward")),
    )
    return next((area for kind, area in kinds if isinstance(error, kind)), otherwise)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without a failure; else as of the command that would have met it: 2 for recipe and data, 1 for the rest."""
    failed = {finding.area for finding in findings if finding.status == "fail"}
    if not failed:
        return 0
    return 2 if failed & {"recipe", "data"} else 1


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    listed = list(findings)
    counts = {status: sum(one.status == status for one in listed) for status in ("pass", "warn", "fail", "skip")}
    return {"counts": counts, "exit_code": exit_code(listed), "findings": [asdict(one) for one in listed]}


def not_checked(findings: Iterable[Finding]) -> str:
    """The names of what was skipped, in one line; empty: nothing was."""
    skipped: dict[str, None] = {}
    for one in findings:
        if one.status == "skip":
            names = one.found.partition(":")[0].split(", ") if one.name == "not-checked" else [one.name]
            skipped |= dict.fromkeys(names)
    return f"skip  not checked: {', '.join(skipped)}" if skipped else ""


def summary(findings: Iterable[Finding]) -> str:
    counts = as_json(findings)["counts"]
    said = [f"{counts['pass']} pass", f"{counts['warn']} warn", f"{counts['fail']} fail"]
    return ", ".join(said + ([f"{counts['skip']} not checked"] if counts["skip"] else []))
