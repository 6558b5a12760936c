"""Errors that are the user's to mend. The command line prints their message alone, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something in the input is wrong. The message says what, where (file, line, key) and what would work."""


class ConfigError(UserError):
    """A recipe or an override is wrong."""


class DataError(UserError):
    """A data file is missing, unreadable, empty or holds bad rows."""


class RewardError(UserError):
    """A reward function broke its contract, or too many scores failed."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded or is not supported."""


class StarvedError(UserError):
    """Dynamic sampling found too few groups with something to learn from. ``rollout_batch``: what it found."""

    def __init__(self, message: str, rollout_batch: object = None) -> None:
        super().__init__(message)
        self.rollout_batch = rollout_batch


class LostError(UserError):
    """What the run needs is gone for good: to try again is of no use."""


class TakenError(UserError, FileExistsError):
    """A file or folder is there already, and is not overwritten."""


class NumericalError(UserError):
    """Loss or gradient were not finite several times in a row."""


def install(extra: str) -> str:
    """The command that installs an optional extra. Where this package is installed, from a wheel or a clone, pip adds
    only what the extra names."""
    return f"pip install 'dapo-rl[{extra}]'"


@contextmanager
def extra(name: str, what: str, error: type[UserError] = ConfigError) -> Iterator[None]:
    """Around imports that ``what`` needs. Raises ``error``: the extra ``name`` is not installed."""
    try:
        yield
    except ImportError as lacking:
        raise error(f"{what} needs {lacking.name}, which is not installed: {install(name)}") from None


def shortened(text: str, most: int, mark: str = "...") -> str:
    """``text``, whose end gives way to ``mark`` where it has more than ``most`` characters."""
    return text if len(text) <= most else text[: most - len(mark)] + mark


def first_line(error: BaseException) -> str:
    """What an error of another library says: where its first line only announces it, the next one too. That a name is
    not known some say with the name alone."""
    if isinstance(error, KeyError):
        return f"{error} is not known"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
