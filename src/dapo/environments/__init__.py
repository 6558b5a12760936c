"""Turns and tools: episodes in place of single responses. Light: environments of users import it in their processes.

Below: ``trace.py`` (what an episode was, in tokens), ``calls.py`` (tools as the model sees and calls them),
``episode.py`` (one episode: who plays asks the model through it), ``worker.py`` (the process that the user's class or
agent runs in), ``endpoint.py`` (OpenAI's API for agents) and ``player.py`` (plays episodes over an engine)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reply:
    """What a tool, or ``reply``, of an environment may return in place of text.

    ``reward``: for the turn that it replies to. ``done``: the episode ends here.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
