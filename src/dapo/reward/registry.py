"""``dapo.reward_function``, the decorator that declares a reward function: its name, and whether it takes batches.

``import dapo`` leads here: standard library only. A declared function stays an ordinary function, with its declaration
attached to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from dapo.errors import RewardError

Function = TypeVar("Function", bound=Callable[..., Any])

BATCH_SIZE = 64  # default of `responses_per_call` for batched functions

_MARK = "__dapo_reward_function__"
_declared: dict[tuple[str, str], Callable[..., Any]] = {}  # by module and registered name


@dataclass(frozen=True, slots=True)
class Declaration:
    """``responses_per_call``: most responses in one call; None: the function takes one at a time."""

    name: str
    responses_per_call: int | None


@overload
def reward_function(function: Function, /) -> Function: ...


@overload
def reward_function(
    *, name: str | None = None, batched: bool = False, responses_per_call: int | None = None
) -> Callable[[Function], Function]: ...


def reward_function(
    function: Any = None, /, *, name: str | None = None, batched: bool = False, responses_per_call: int | None = None
) -> Any:
    """Declare a reward function: ``@dapo.reward_function``, or with arguments in parentheses.

    A function that takes one response is ``def f(prompt, response, answer, **meta)`` and returns a float, a bool, a
    dict with "value" or a :class:`~dapo.records.Reward`. A batched one is ``def f(prompts, responses, answers,
    **meta)``: it gets lists of one length, also of the row's other keys (None where a row lacks the key), and returns
    as many values, in order. Either may be ``async``, and leave out parameters. The recipe's ``args`` are passed as
    they are, also to a batched function.

    Args:
        name: for Python (``train(..., reward="name")``) and recipes (``file.py:name``); by default its own name.
        batched: whether it takes lists. All responses that wait go into one call.
        responses_per_call: most responses in one call, 64 by default.

    Raises RewardError: the arguments do not fit, or the module has another function of this name."""
    if responses_per_call is not None and not batched:
        raise RewardError(f"reward_function: responses_per_call={responses_per_call} does nothing without batched=True")
    if responses_per_call is not None and (type(responses_per_call) is not int or responses_per_call < 1):
        raise RewardError(
            f"reward_function: responses_per_call must be a whole number of at least 1, got {responses_per_call!r}"
        )
    if name is not None and (not isinstance(name, str) or not name or ":" in name):
        raise RewardError(f"reward_function: name must be text without a colon, got {name!r}")

    def declare(found: Any) -> Any:
        size = (responses_per_call or BATCH_SIZE) if batched else None
        _register(found, Declaration(name or getattr(found, "__name__", None) or type(found).__name__, size))
        return found

    return declare if function is None else declare(function)


def declaration(function: Callable[..., Any]) -> Declaration | None:
    """None: ``function`` is not declared."""
    return getattr(function, _MARK, None)


def declared_in(module: str) -> dict[str, Callable[..., Any]]:
    return {name: function for (place, name), function in _declared.items() if place == module}


def named(name: str) -> Callable[..., Any]:
    """The declared function called ``name``. Raises RewardError: there is none, or several modules declare one."""
    found = {place: function for (place, known), function in _declared.items() if known == name}
    if len(found) == 1:
        return found.popitem()[1]
    if found:
        places = ", ".join(sorted(found))
        raise RewardError(f"reward {name!r}: several modules declare it ({places}); pass the function itself")
    raise RewardError(
        f"reward {name!r}: no function is declared under this name with @dapo.reward_function; there are: "
        f"{', '.join(sorted({one for _, one in _declared})) or 'none'} (a function in a file or module is named in the "
        "settings: reward.kind=function, reward.function=file.py:name)"
    )


def _register(function: Any, told: Declaration) -> None:
    if not callable(function):
        raise RewardError(f"reward_function: expected a function, got {type(function).__name__} {function!r}")
    module = getattr(function, "__module__", None) or ""
    before = _declared.get((module, told.name))
    # declared again: by a file that is imported again, a notebook cell that runs again, or inside of a function
    anew = module == "__main__" or _place(before) == _place(function) or "<locals>" in _place(function)
    if before is not None and not anew:
        raise RewardError(
            f"reward_function: {module} declares two functions under the name {told.name!r}, {_place(before)} and "
            f"{_place(function)}; give one of them another name=..."
        )
    try:
        setattr(function, _MARK, told)
    except AttributeError:
        raise RewardError(
            f"reward_function: {function!r} cannot be declared (nothing can be attached to it); put it into a function"
        ) from None
    _declared[module, told.name] = function


def _place(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__
