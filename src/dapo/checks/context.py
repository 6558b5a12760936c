"""What the checks look at, a recipe and what has been loaded for it so far, and what they find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dapo.errors import ConfigError, DataError, ModelError, RewardError, UserError
from dapo.model.hub import is_name
from dapo.util.files import holds_model
from dapo.util.terminal import visible

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.data.source import PromptSource
    from dapo.data.template import PromptTemplate
    from dapo.records import Prompt

T = TypeVar("T")


class NotAtHand(Exception):
    """A check needs something that an earlier one could not provide, and has said why. Its message is that thing."""


@dataclass(slots=True)
class CheckContext:
    """A recipe, and what the checks that own a thing have put here; None: it is not there (yet).

    ``demo``: how ``dapo demo`` is called to make the files of a shipped recipe; ``remedy``: where a recipe says how.
    ``reward_works``: a scorer starts. ``own_reward``: a function from Python, or the environment, scores in place of
    the recipe's reward. ``at_start``: of a training, which has loaded everything."""

    config: Config
    demo: str | None = None
    remedy: str = ""
    files: bool | None = None
    tokenizer: Any = None
    template: PromptTemplate | None = None
    source: PromptSource | None = None
    heldout: Sequence[Prompt] = ()
    model_config: Any = None
    shape: Any = None  # the model without its numbers, on the meta device
    device: Any = None
    fits: bool | None = None  # whether the predicted memory is free
    words_known: bool | None = None  # whether all ids of the tokenizer lie within the model
    model: Any = None
    reward_works: bool | None = None
    own_reward: bool = False
    at_start: bool = False
    probe: int = 0

    def need(self, thing: T | None, what: str) -> T:
        """``thing``, which another check provides. Raises NotAtHand if it did not."""
        if thing is None:
            raise NotAtHand(what)
        return thing


def config_at_hand(name: str) -> bool:
    """Whether the config of the model ``name``, a folder or a name on the hub, can be read without a download."""
    folder = Path(name).expanduser()
    return holds_model(folder) or (not folder.exists() and is_name(name) and on_this_machine(name, "config.json"))


def on_this_machine(name: str, file: str) -> bool:
    """Whether ``name``, a folder or a name on the hub, can be loaded without a download, or is a path for sure.

    ``file``: one that belongs to it."""
    if Path(name).expanduser().exists() or not is_name(name):
        return True
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file), str)


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
    kinds: dict[type[UserError], Area] = {ConfigError: "recipe", DataError: "data", ModelError: "model"}
    kinds[RewardError] = "reward"
    return next((area for kind, area in kinds.items() if isinstance(error, kind)), otherwise)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without a failure; else as of the command that would have met it: 2 for recipe and data, 1 for the rest."""
    failed = {finding.area for finding in findings if finding.status == "fail"}
    return 0 if not failed else 2 if failed & {"recipe", "data"} else 1


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
