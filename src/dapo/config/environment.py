"""Turns and tools: what the model acts in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dapo.config.section import Named, OneOf, PathText, Section

BUILT_IN = ("python",)


class EnvironmentConfig(Section):
    name: Annotated[PathText, AfterValidator(OneOf(BUILT_IN))] | None = None
    """Class of the environment, whose public methods are tools; or `python`, a Python tool in the sandbox. null and no
    agent: each sample is one response."""
    agent: Named | None = None
    """In place of `name`: a function `agent(base_url, row)` that talks to the model through OpenAI's API at `base_url`.
    What it returns is the reward, or None: the recipe's reward scores the last answer."""
    max_turns: int = Field(8, ge=1, le=10_000)
    """Answers of the model in one episode at most."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Longest answer in one turn. null: what is left of the episode, which has rollout.max_response_length tokens,
    those of the environment counted. A turn that is cut is left out of the loss."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest time for one episode. What has been said until then is scored."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Longest time for one call of the environment's; after it the episode ends."""
    reply_chars: int = Field(10_000, ge=1, le=10_000_000)
    """Longest reply of a tool; what is beyond is cut, with a mark that says so."""
    workers: int = Field(16, ge=1, le=4096)
    """Processes for environments and agents. Each has one episode at a time, so as many episodes are played at once."""
    credit: Literal["outcome", "turn"] = "outcome"
    """What a turn is given credit for: `outcome`, the reward of the episode; `turn`, rewards from this turn on."""

    def problems(self) -> Iterator[str]:
        if self.name and self.agent:
            yield "agent: goes without environment.name, as each of them plays the episode; leave one out"

    @property
    def on(self) -> bool:
        return bool(self.name or self.agent)
