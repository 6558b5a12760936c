"""What of a response is thinking and what was said. Pure text, linear time whatever the text.

The tags are those in use: ``<think>``, ``<thinking>``, ``<thought>``, ``<reasoning>``, ``[THINK]``,
``<|begin_of_thought|>``, ``<|START_THINKING|>``, ``<|channel>thought`` and the like, each with its closing one. Where
parts of a response name their channel (``<|channel|>analysis<|message|>``), all but ``final`` is thinking.
"""

from __future__ import annotations

import re

_NAME = "(?:think(?:ing)?|thoughts?|reasoning)"
_TAG = re.compile(
    rf"< ?/? ?(?:\w{{1,16}}[:_])?{_NAME}(?:\s[\w-]{{1,16}}=[^<>]{{0,60}})?\s?>"
    r"|\[/?(?-i:THINK)\]|\u25c1/?think\u25b7"
    rf"|<\|(?:begin|start|end)_(?:of_)?{_NAME}\|>"
    r"|<\|channel\|>\s?\w{1,16}(?:[^<]{0,100}(?:<\|constrain\|>\w{0,20})?<\|message\|>)?"
    r"|<\|channel>thought|<channel\|>|<unused94>thought|<unused95>",
    re.IGNORECASE,
)
_LONGEST_END = 1000  # characters of a prompt's end that are looked at: it may come from anybody


def outside_thinking(response: str) -> str:
    """``response`` without its thinking blocks. One that is not closed goes to the end; one that is closed but not
    opened (chat templates open it in the prompt) starts at the beginning."""
    outside: list[str] = []
    start = 0  # of the present piece
    within: str | None = None  # name of the block's tag
    for tag in _TAG.finditer(response):
        name, closes = _read(tag[0])
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

    In a prompt a tag is one where it has a line of its own, or is the last there is: others are spoken of.
    """
    opened, prompt_end = None, prompt_end[-_LONGEST_END:]
    for tag in _TAG.finditer(prompt_end):
        before, after = prompt_end[: tag.start()], prompt_end[tag.end() :]
        alone = not (before.rpartition("\n")[2].strip() or after.partition("\n")[0].strip()) or not after.strip()
        opened = None if _read(tag[0])[1] else tag[0] if alone else opened
    return response if opened is None else opened + response


def _read(tag: str) -> tuple[str, bool]:
    """What the two tags of a pair have in common, and whether it is the closing one."""
    text = tag.lower()
    if text.startswith("<|channel|>"):
        return "<|channel|>", text[11:].lstrip().startswith("final")
    name = re.sub(r"\s[\w-]+=.*(?=>)|[/|\s]|begin_|start_|end_|(?<=>)thought", "", text, flags=re.DOTALL)
    closes = re.match(r"\W*/|<\|end|<channel\||<unused95", text) is not None
    return name.replace("unused94", "unused95"), closes
