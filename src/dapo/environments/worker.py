"""The user's environment or agent, in a process of its own: what hangs or dies there costs one episode.

A handler for ``dapo.reward.worker``. An item is {"do": ..., ...}: ``reset`` makes an environment, the others are about
the one that was made last. All text that comes back is cut to a length. There may be hundreds: what few need is
imported where it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dapo.environments import Reply
from dapo.environments.calls import RESERVED
from dapo.errors import RewardError, UserError
from dapo.reward.convert import LARGEST, reward_to_json, to_reward
from dapo.util.user_code import describe, load_named


def environment_class(name: str) -> Any:
    """Raises ConfigError: it cannot be loaded."""
    return load_named("dapo.environments.python:PythonTool" if name == "python" else name, "environment.name")


def make_handler(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """``options``: ``name`` or ``agent``, and ``reply_chars``."""
    return _Agent(options) if options["agent"] else _Environment(options)


class _Agent:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._agent = load_named(options["agent"], "environment.agent")

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        def played() -> dict[str, Any]:
            found = self._agent(item["base_url"], item["row"])
            if inspect.iscoroutine(found):
                import asyncio

                found = asyncio.run(found)
            return _scored(found)

        return _tried("the agent", played)


class _Environment:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._kind, self._most = environment_class(options["name"]), options["reply_chars"]
        self._here: Any = None

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        did: dict[str, Any] = getattr(self, f"_{item.pop('do')}")(**item)
        return did

    def _reset(self, row: dict[str, Any]) -> dict[str, Any]:
        def begun() -> dict[str, Any]:
            self._here = self._kind()
            said = _given(self._here.reset, row) if hasattr(self._here, "reset") else None
            last_turn = getattr(self._here, "last_turn", "")
            if not isinstance(last_turn, str):
                raise RewardError(f"environment: last_turn must be text; it is a {type(last_turn).__name__}")
            if not isinstance(said, list | tuple):
                said = said and self._cut(str(said))
            elif not said or not all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in said):
                raise RewardError('environment: reset must return text or messages, {"role": ..., "content": ...}')
            return {"begun": said, "last_turn": self._cut(last_turn)}

        return _tried("reset", begun)

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A tool that does not exist, or that raises, is told to the model, who may do better."""
        if name.startswith("_") or name in RESERVED or not callable(getattr(self._kind, name, None)):
            return self._reply(f"Error: there is no tool {name!r}")
        try:
            return self._reply(getattr(self._here, name)(**arguments))
        except UserError:  # such as that there is no sandbox
            raise
        except Exception as error:
            return self._reply(f"Error: {type(error).__name__}: {error}")

    def _say(self, text: str) -> dict[str, Any]:
        """Text without a call: ``reply`` answers, and without such a method, or if it returns None, the end is here."""

        def said() -> dict[str, Any]:
            found = self._here.reply(text) if hasattr(self._here, "reply") else None
            return {"text": None} if found is None else self._reply(found)

        return _tried("reply", said)

    def _reward(self, given: dict[str, Any]) -> dict[str, Any]:
        def found() -> dict[str, Any]:
            return _scored(_given(self._here.reward, given) if hasattr(self._here, "reward") else None)

        return _tried("reward", found)

    def _reply(self, found: Any) -> dict[str, Any]:
        reply = found if isinstance(found, Reply) else Reply(str(found))
        with suppress(TypeError, ValueError):
            if abs(value := float(reply.reward)) <= LARGEST:
                return {"text": self._cut(str(reply.text)), "reward": value, "done": bool(reply.done)}
        raise RewardError(f"environment: the reward of a Reply must be a finite number; it is {reply.reward!r}")

    def _cut(self, text: str) -> str:
        if len(text) <= self._most:
            return text
        return f"{text[: self._most]} ... (cut, it had {len(text):,} characters)"


def _tried(what: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except UserError:  # a broken contract ends the run
        raise
    except Exception as error:
        return {"died": f"{what}: {describe(error)}"}


def _given(function: Callable[..., Any], named: dict[str, Any]) -> Any:
    """Call it with what it takes of ``named``."""
    takes = inspect.signature(function).parameters.values()
    everything = any(one.kind is one.VAR_KEYWORD for one in takes)
    names = {one.name for one in takes}
    return function(**{name: value for name, value in named.items() if everything or name in names})


def _scored(found: Any) -> dict[str, Any]:
    return {"reward": None if found is None else reward_to_json(to_reward(found, "environment"))}
