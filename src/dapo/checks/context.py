"""What the checks look at: a recipe, and what has been loaded for it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dapo.model.hub import is_name
from dapo.util.files import holds_model

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.data.source import PromptSource
    from dapo.data.template import PromptTemplate
    from dapo.records import Prompt

T = TypeVar("T")


class NotAtHand(Exception):
    """A check needs something that an earlier one could not provide, and has said why. ``what``: that thing."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(slots=True)
class CheckContext:
    """A recipe, and what the checks that own a thing have put here; None: it is not there (yet).

    ``demo``: how ``dapo demo`` is called to make the files of a shipped recipe; ``remedy``: where a recipe says how.
    ``reward_works``: a scorer starts. ``own_reward``: a function was passed from Python, and the recipe's reward is not
    what scores. ``at_start``: of a training, which has loaded everything."""

    config: Config
    demo: str | None = None
    remedy: str = ""
    files: bool | None = None
    tokenizer: Any = None
    template: PromptTemplate | None = None
    source: PromptSource | None = None
    heldout: Sequence[Prompt] = ()
    model_config: Any = None
    shape: Any = None
    """The model without its numbers, on the meta device."""
    device: Any = None
    fits: bool | None = None
    """Whether the predicted memory is free."""
    words_known: bool | None = None
    """Whether all ids of the tokenizer lie within the model."""
    model: Any = None
    reward_works: bool | None = None
    own_reward: bool = False
    at_start: bool = False
    probe: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """What each check took."""

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
