"""The user's own reward function: loaded from ``package.module:name`` or ``path/file.py:name``, and called with the
keyword arguments it takes, in worker processes (named in YAML) or in the parent (passed from Python)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from dapo.errors import RewardError
from dapo.reward.convert import reward_to_json, to_reward, to_rewards
from dapo.reward.registry import declaration, declared_in
from dapo.util.user_code import describe, load_named
from dapo.util.verdict import Reward

CONTRACT = "def f(prompt, response, answer, **meta) -> float | bool | dict | Reward"
BATCH_CONTRACT = "def f(prompts, responses, answers, **meta) -> list of (float | bool | dict | Reward)"
ASYNC_AT_ONCE = 64  # calls of an async function that are awaited together
_IN_BATCHES = ("prompts", "responses", "answers")
_ELSEWHERE = ("completions", "data_source", "solution_str", "ground_truth", "queries", "labels")
"""Arguments of reward functions for TRL, verl and OpenRLHF."""
_IF_NAMED = ("finish_reason", "prompt_end")
"""Arguments for functions that name them; with an s in batches. ``**meta`` gets only the keys of the row."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``spec`` names.
    ``spec``: ``package.module:name`` or ``path/file.py:name`` (the name of a function there, or the one it is declared
    under); a relative path starts in the working folder.
    Raises RewardError: the file or module is missing, fails while being imported, or holds no such function."""
    return load_named(spec, "reward function", RewardError, declared_in)  # type: ignore[no-any-return]


class BoundFunction:
    """A reward function with its name and the recipe's ``args``. ``responses_per_call``: most responses in one call;
    None: as it is declared, by default one at a time.
    Raises RewardError: it takes no such arguments, or is declared to take one response at a time."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        args: Mapping[str, Any] | None = None,
        responses_per_call: int | None = None,
    ) -> None:
        self.function = function
        self.name = name
        self.args = dict(args or {})
        self.responses_per_call = self._responses_per_call(responses_per_call)
        try:
            self.parameters: dict[str, inspect.Parameter] | None = dict(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # some callables written in C tell nothing of their parameters
            self.parameters = None
        unknown = sorted(set(self.args) - set(self._accepted(self.args)))
        if unknown:
            raise RewardError(
                f"reward function {name}: reward.args names {', '.join(map(repr, unknown))}, which it does not take; "
                f"its parameters are {', '.join(self.parameters or ())}"
            )

    @cached_property
    def is_async(self) -> bool:
        call = getattr(self.function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def arguments(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The keyword arguments of one call: only those that the function takes, unless it takes any.
        ``items``: one, or several for a batched function, which gets a list for each key, with None where an item lacks
        it. Keys: "prompt", "response", "answer", :data:`_IF_NAMED`, and "meta" with those of the row.

        Raises RewardError: the function requires a parameter that has no value."""
        meta, said = items[0]["meta"], {key: value for key, value in items[0].items() if key != "meta"}
        if self.responses_per_call is not None:
            keys = dict.fromkeys(key for item in items for key in item["meta"])
            meta = {key: [item["meta"].get(key) for item in items] for key in keys}
            said = {f"{key}s": [item[key] for item in items] for key in said}
        parameters = self.parameters or {}
        said = {key: value for key, value in said.items() if key.rstrip("s") not in _IF_NAMED or key in parameters}
        offered = {**meta, **said, **self.args}
        for parameter in parameters.values():
            variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            given = parameter.name in offered and parameter.kind is not parameter.POSITIONAL_ONLY
            if not (variadic or given) and parameter.default is parameter.empty:
                contract, hint = CONTRACT if self.responses_per_call is None else BATCH_CONTRACT, ""
                if self.responses_per_call is None and parameter.name in _IN_BATCHES:
                    hint = "; if it takes lists, declare it with @dapo.reward_function(batched=True)"
                elif parameter.name in _ELSEWHERE:
                    hint = "; docs/coming-from.md shows how to use a function for TRL, verl or OpenRLHF"
                raise RewardError(
                    f"reward function {self.name}: it requires the parameter {parameter.name!r}, but is called with "
                    f"{', '.join(offered)}, by keyword; expected {contract}{hint}"
                )
        return self._accepted(offered)

    def rewards(self, result: Any, count: int) -> list[Reward]:
        """The rewards of the ``count`` responses of one call. Raises RewardError: ``result`` is not what it may
        return."""
        if self.responses_per_call is None:
            return [to_reward(result, self.name)]
        return to_rewards(result, self.name, count)

    def _responses_per_call(self, wanted: int | None) -> int | None:
        declared = declaration(self.function)
        if declared is None:
            return wanted
        if wanted is not None and declared.responses_per_call is None:
            raise RewardError(
                f"reward function {self.name}: reward.responses_per_call is {wanted}, but it is declared as taking one "
                "response at a time; use @dapo.reward_function(batched=True) or reward.responses_per_call=null"
            )
        return wanted or declared.responses_per_call

    def _accepted(self, offered: dict[str, Any]) -> dict[str, Any]:
        if self.parameters is None or any(p.kind is p.VAR_KEYWORD for p in self.parameters.values()):
            return offered
        by_keyword = {p.name for p in self.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        return {key: value for key, value in offered.items() if key in by_keyword}

    def raised(self, error: BaseException) -> str:
        return f"reward function {self.name} raised {describe(error)}"


def make_handler(options: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The worker's side. ``options``: "function" (its spec), "args" and "responses_per_call".

    A message is {"items": [...]}, one item unless the function is batched, or async: then its calls are awaited
    together. Its reply is {"rewards": [...]}, or {"raised": message}. Or it is {"about": true}, answered with
    {"responses_per_call": ...}.
    """
    spec = options["function"]
    bound = BoundFunction(load_function(spec), spec, options["args"], options["responses_per_call"])
    loop = asyncio.new_event_loop()  # one for all calls: sessions that an async function keeps stay usable

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        if "about" in message:
            return {"responses_per_call": bound.responses_per_call or (ASYNC_AT_ONCE if bound.is_async else None)}
        items = message["items"]
        if bound.responses_per_call is None and bound.is_async:
            rewards = loop.run_until_complete(_await_all(bound, items))
            return {"rewards": [reward_to_json(reward) for reward in rewards]}
        arguments = bound.arguments(items)
        try:
            result = bound.function(**arguments)
            if inspect.isawaitable(result):
                result = loop.run_until_complete(asyncio.ensure_future(result, loop=loop))
        except BaseException as error:  # whatever it raises, this worker goes on
            return {"raised": bound.raised(error)}
        return {"rewards": [reward_to_json(reward) for reward in bound.rewards(result, len(items))]}

    return handle


async def _await_all(bound: BoundFunction, items: Sequence[Mapping[str, Any]]) -> list[Reward]:
    async def one(item: Mapping[str, Any]) -> Reward:
        arguments = bound.arguments([item])
        try:
            result = await bound.function(**arguments)
        except BaseException as error:  # whatever it raises, the others go on
            return Reward(None, 0.0, error=bound.raised(error))
        return to_reward(result, bound.name)

    return list(await asyncio.gather(*(one(item) for item in items)))
