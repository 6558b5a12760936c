"""Plays episodes: the user's class or agent in a worker process, the model behind an engine.

Consumes prompts and :data:`~dapo.environments.episode.Ask`. Produces :class:`Played`. Waits for a free worker, for its
calls (each with a time limit) and for the model. A worker that hangs or dies is replaced, and its episode has no
verdict; one whose episode is cancelled is killed with all that it started.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dapo.config import Config
from dapo.data.template import PromptTemplate
from dapo.environments.calls import tools_of
from dapo.environments.episode import Ask, Episode, Limits, Over
from dapo.environments.python import PythonTool, sandbox
from dapo.environments.worker import environment_class
from dapo.errors import ConfigError, extra
from dapo.records import Prompt, Reward, Sample
from dapo.reward.contract import Scorer
from dapo.reward.pool import ScoringFailed, Session, WorkerPool
from dapo.util.user_code import load_named


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that is over. ``reward``: of the environment or the agent; None: it leaves that to the recipe's."""

    episode: Episode
    reward: Reward | None

    def sample(self, request_id: int, index: int, prompt: Prompt) -> Sample:
        return self.episode.trace.sample(request_id, index, str(self.episode.ended), prompt.token_ids)

    async def scored(self, sample: Sample, prompt: Prompt, scorer: Scorer) -> Reward:
        """The verdict: what the environment says, or ``scorer`` of the last answer, and the rewards of turns."""
        last = self.episode.last
        reward = self.reward or await scorer.score(prompt, last.said if last else "", sample.finish_reason)
        given = sum(turn.reward for part in sample.parts for turn in part.turns)
        return replace(reward, value=reward.value + given) if given and reward.error is None else reward


class Player:
    """Plays while its context is entered. Raises ConfigError: environment or agent cannot be loaded."""

    def __init__(self, config: Config, template: PromptTemplate, *, temperature: float, response: int) -> None:
        """``response``: tokens of an episode behind its prompt."""
        self._config, self._template, self._temperature = config.environment, template, temperature
        self._limits = Limits(config.data.max_prompt_length + response, response)
        self._tools = check_environment(config)
        self._closing = AsyncExitStack()
        options = config.environment.model_dump(include={"name", "agent", "reply_chars"})
        self._pool = WorkerPool(
            "dapo.environments.worker:make_handler",
            options,
            workers=self._config.workers,
            timeout_s=self._config.tool_timeout_s,
        )

    async def __aenter__(self) -> Player:
        self._closing.push_async_callback(self._pool.close)
        if self._config.agent:
            with extra("server", "environment.agent"):
                from dapo.environments.endpoint import Endpoint
            self._endpoint = await self._closing.enter_async_context(Endpoint(self._temperature))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    def seat(self) -> AbstractAsyncContextManager[Session]:
        """A worker for one episode. Waits until one is free."""
        return self._pool.session()

    async def play(self, session: Session, prompt: Prompt, ask: Ask) -> Played:
        """Raises what ``ask`` raises. UserError: the user's code broke its contract."""
        episode = Episode(self._template, ask, self._config, self._limits)
        row = {**prompt.meta, "prompt": prompt.text, "answer": prompt.answer}
        messages: list[dict[str, Any]] = [dict(m) for m in self._template.messages(prompt.messages or prompt.text)]
        found: Mapping[str, Any] = {}
        why = ""
        try:
            async with episode.timed():
                if self._config.agent:
                    with self._endpoint.address(episode) as base_url:
                        found = await session.ask({"base_url": base_url, "row": row}, timed=False)
                        episode.end("died" if "died" in found else "done")
                else:
                    episode.end(await self._turns(session, episode, row, messages))
        except Over:
            pass
        except TimeoutError:
            episode.end("timeout")
        except ScoringFailed as error:
            episode.end("died")
            why = str(error)
        await episode.quiet()  # an agent may have a thread that goes on
        if episode.failed is not None:
            raise episode.failed
        if not self._config.agent and not why and session.alive:
            try:
                said = episode.last.said if episode.last else ""
                given = row | {"messages": messages, "response": said, "ended": episode.ended}
                found = await session.ask({"do": "reward", "given": given})
            except ScoringFailed as error:
                why = str(error)
        why = why or (found.get("died", "") if episode.ended == "died" or not self._config.agent else "")
        if why:
            episode.ended = "died"
            return Played(episode, Reward(None, 0.0, error=f"environment: {why}"))
        reward = found.get("reward")
        return Played(episode, Reward(**reward) if reward else None)

    async def _turns(self, session: Session, episode: Episode, row: Any, messages: list[dict[str, Any]]) -> str:
        """Play with an environment until it or the model comes to an end. ``messages`` grow."""
        found = await _asked(session, {"do": "reset", "row": row})
        begun, last_turn, may_call = found["begun"], found["last_turn"], True
        if isinstance(begun, list):
            messages[:] = begun
        elif begun:
            messages[-1]["content"] += begun
        while True:
            answer = await episode.complete(messages, self._tools, may_call=may_call)
            messages.append({"role": "assistant", "content": answer.raw})
            done = False
            for call in answer.calls:
                item = {"do": "call", "name": call.name, "arguments": call.arguments}
                done |= self._heard(await _asked(session, item), episode, messages, "tool")
            if answer.stop == "malformed":
                messages.append({"role": "tool", "content": f"Error: {answer.fault}"})
            elif not answer.calls:
                found = await _asked(session, {"do": "say", "text": answer.said})
                if found["text"] is None:
                    return "max_tokens" if answer.stop == "length" else "done"
                done = self._heard(found, episode, messages, "user")
            if done:
                return "done"
            if last_turn and answer.turns_left == 1:
                messages[-1]["content"] += f"\n{last_turn}"
                may_call = False

    @staticmethod
    def _heard(found: Mapping[str, Any], episode: Episode, messages: list[dict[str, Any]], role: str) -> bool:
        messages.append({"role": role, "content": found["text"]})
        episode.trace.reward(found["reward"])
        return bool(found["done"])


async def _asked(session: Session, item: Mapping[str, Any]) -> dict[str, Any]:
    found = await session.ask(item)
    if "died" in found:
        raise ScoringFailed(found["died"])
    return found


def check_environment(config: Config) -> list[Any]:
    """The tools that the recipe's environment has. Raises UserError: it cannot be used; says why."""
    settings = config.environment
    if not settings.on:
        return []
    if settings.agent:
        load_named(settings.agent, "environment.agent")
        return []
    kind = environment_class(str(settings.name))
    if not isinstance(kind, type):
        raise ConfigError(f"environment.name: {settings.name} is a {type(kind).__name__}; it must be a class")
    if kind is PythonTool:
        sandbox()
    return tools_of(kind, "environment.name")


def hidden_tools(config: Config, template: PromptTemplate, prompt: Prompt) -> str:
    """What to say where no chat template writes the environment's tools and the prompt does not name them."""
    if template.source or not config.environment.name:
        return ""
    tools = tools_of(environment_class(config.environment.name), "environment.name")
    names, seen = [tool["function"]["name"] for tool in tools], template.text(prompt.token_ids)
    hidden = [name for name in names if not re.search(rf"\b{name}\b", seen)]
    if not hidden:
        return ""
    return (
        f"the model is not shown the tools of {config.environment.name}: {', '.join(hidden)}; a prompt does not name "
        f"them, and there is no chat template to write them (data.template={config.data.template})"
    )


SHOW_TOOLS = "data.template=chat with a model that has a chat template, or data.instruction=TEXT that describes them"
"""What would work then."""


def scores_itself(config: Config) -> bool:
    """Whether the environment or agent has a reward, so that the recipe's need not be able to score all rows."""
    name = config.environment.name
    return bool(config.environment.agent) or (bool(name) and hasattr(environment_class(str(name)), "reward"))


def player_for(config: Config, template: PromptTemplate, *, evaluation: bool = False) -> Callable[[], Player] | None:
    """Makes one that plays as the recipe says, in training or in an ``evaluation``; None: there are no episodes."""
    if not config.environment.on:
        return None
    temperature = config.evaluation.temperature if evaluation else config.rollout.temperature
    response = config.evaluated_length if evaluation else config.rollout.max_response_length
    return partial(Player, config, template, temperature=temperature, response=response)
