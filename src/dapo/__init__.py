"""dapo: reinforcement learning for language models with DAPO (arXiv 2503.14476).

``import dapo`` stays light: torch and transformers are loaded when a run starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dapo.util.version import VERSION as __version__

__all__ = ["__version__", "evaluate", "generate", "open_run", "reward_function", "train"]
__all__ += ["compare", "dpo", "filter", "rank", "reward_model", "sft"]

if TYPE_CHECKING:
    from dapo.api import train
    from dapo.api.compare import compare
    from dapo.api.inference import evaluate, generate
    from dapo.api.ranking import filter, rank
    from dapo.api.run import open_run
    from dapo.api.stages import dpo, reward_model, sft
    from dapo.reward.registry import reward_function

_HOMES = {
    **{"train": "dapo.api", "evaluate": "dapo.api.inference", "generate": "dapo.api.inference"},
    **dict.fromkeys(("dpo", "reward_model", "sft"), "dapo.api.stages"),
    **dict.fromkeys(("filter", "rank"), "dapo.api.ranking"),
    **{"compare": "dapo.api.compare"},
    **{"open_run": "dapo.api.run", "reward_function": "dapo.reward.registry"},
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dapo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
