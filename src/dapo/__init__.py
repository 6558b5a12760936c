"""dapo: reinforcement learning for language models with DAPO (arXiv 2503.14476).

``import dapo`` stays light: torch and transformers are loaded when a run starts.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "reward_function", "train"]

if TYPE_CHECKING:
    from dapo.api import train
    from dapo.reward.registry import reward_function


def __getattr__(name: str) -> Any:
    if name == "train":
        from dapo.api import train

        return train
    if name == "reward_function":
        from dapo.reward.registry import reward_function

        return reward_function
    raise AttributeError(f"module 'dapo' has no attribute {name!r}")
