"""What of a response is thinking and what was said. Pure text, linear time whatever the text.

The tags are those in use: ``<think>``, ``<thinking>``, ``<thought>``, ``<reasoning>``, ``[THINK]``,
``<|begin_of_thought|>``, ``<|START_THINKING|>`` and the like, each with its closing one.
"""

from __future__ import annotations

import re

_NAME = "think(?:ing)?|thoughts?|reasoning"
_TAG = re.compile(
    rf"<(?P<end>/)?(?:\w{{1,16}}:)?(?P<name>{_NAME})>"
    r"|\[(?P<end_bracket>/)?(?P<bracket>(?-i:THINK))\]|\u25c1(?P<end_triangle>/)?(?P<triangle>think)\u25b7"
    rf"|<\|(?:(?P<end_pipe>end)|begin|start)_(?:of_)?(?P<pipe>{_NAME})\|>",
    re.IGNORECASE,
)
"""Of the named groups those of one form take part in a match: the tag's name, and for a closing tag its mark."""


def outside_thinking(response: str) -> str:
    """``response`` without its thinking blocks. One that is not closed goes to the end; one that is closed but not
    opened (chat templates open it in the prompt) starts at the beginning."""
    outside: list[str] = []
    start = 0  # of the present piece
    within: str | None = None  # name of the block's tag
    for tag in _TAG.finditer(response):
        name, closes = _read(tag)
        if within is not None:
            if closes and name == within:
                within, start = None, tag.end()
        elif closes:  # never opened
            outside.clear()
            start = tag.end()
        else:
            outside.append(response[start : tag.start()])
            within = name
    return "".join(outside) + ("" if within is not None else response[start:])


def behind(prompt_end: str, response: str) -> str:
    """``response``, with the thinking tag in front that the prompt left open, if it did.

    In a prompt a tag is one where a line begins with it, or where it is the last there is: others are spoken of.
    """
    opened = None
    for tag in _TAG.finditer(prompt_end):
        alone = not prompt_end[: tag.start()].rpartition("\n")[2].strip() or not prompt_end[tag.end() :].strip()
        opened = None if _read(tag)[1] else tag[0] if alone else opened
    return response if opened is None else opened + response


def _read(tag: re.Match[str]) -> tuple[str, bool]:
    """The tag's name, and whether it closes."""
    found = {group: text for group, text in tag.groupdict().items() if text is not None}
    name = next(text for group, text in found.items() if not group.startswith("end"))
    return name.lower(), any(group.startswith("end") for group in found)
