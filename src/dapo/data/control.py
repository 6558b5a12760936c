"""Which tokens of a tokenizer are control tokens: padding, begin and end of text, and the marks around turns.

They structure a conversation and are no part of what is said in it, so decoded responses are without them. Every other
token stays, special or not: ``<think>``, ``</answer>``, ``<tool_call>``, placeholders of images, the unknown token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NAMED = ("pad", "bos", "eos", "cls", "sep", "mask")
"""Roles of tokens that a tokenizer names itself. The unknown token is not among them: it stands for text."""
SAID = {"system": "Zsystem1", "user": "Zuser2", "assistant": "Zassistant3"}
"""Contents of the messages that a chat template is tried with."""
_ROLES = frozenset(("system", "user", "assistant", "developer", "model", "human", "bot", "chatbot"))
_OPENING, _CLOSING = frozenset(("begin", "start", "open")), frozenset(("end", "close"))
_BRACKETED = re.compile(r"[<\[\u25c1]\S+[>\]\u25b7]")
_USUAL = frozenset(
    ("im", "turn", "header id", "role", "text", "endoftext", "startoftext", "sentence", "eot id", "eom id")
)
"""Names of special tokens that are marks of a turn or text also where no chat template shows it (a base model)."""


def control_ids(tokenizer: Any, rendered: Sequence[str], stop_ids: Iterable[int] = ()) -> frozenset[int]:
    """The control tokens' ids.

    A token that was added to the vocabulary is a turn mark if the chat template writes it where a turn begins or ends:
    a system text may mention others. Half of a pair of tags, such as ``<think>`` and ``</think>``, is none: templates
    write those as well. What tells a pair of turn marks from one of tags is that the template puts a message of the
    system's or the user's, or the name of a role, between them. Nor is one without a word, such as a line end, or one
    of those that name the channel of what follows: they tell what is thinking.
    ``rendered``: conversations as the chat template writes them, with the contents of :data:`SAID`. Without the head of
    a turn to come, where some templates open ``<think>``. ``stop_ids``: what ends a response. Of them count those that
    were added to the vocabulary and are not half of a pair of tags: ``</answer>`` ends a response, and is a part of it.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {int(token_id): str(token.content) for token_id, token in added.items()}
    bracketed = {token_id: _name(text) for token_id, text in texts.items() if _BRACKETED.fullmatch(text)}
    found = {getattr(tokenizer, f"{role}_token_id", None) for role in _NAMED}
    everything, lone = "\n".join(rendered), set[int]()
    for token_id, text in texts.items():
        special = added[token_id].special
        if special and _name(text) in _USUAL:
            found.add(token_id)
        elif text in everything and (token_id in bracketed or (special and _words(text))):
            if _name(text) in ("channel", "message"):
                continue
            partners = [texts[i] for i in _partners(token_id, bracketed)]
            if (closing := f"{text[0]}/{text[1:]}") in everything:  # which may be several tokens
                partners.append(closing)
            if any(_enclose_turn(text, partner, rendered) for partner in partners):
                found.add(token_id)
            elif not partners:
                lone.add(token_id)
    while more := {
        one
        for one in lone - found
        if _bounds_turn(texts[one], rendered, [text for i, text in texts.items() if i in found])
    }:
        found |= more
    for token_id in texts.keys() & set(stop_ids):
        partners_ids = _partners(token_id, bracketed)
        if not partners_ids or found.intersection(partners_ids):
            found.add(token_id)
    return frozenset(token_id for token_id in found if token_id is not None)


def _partners(token_id: int, names: Mapping[int, str]) -> list[int]:
    return [other for other, name in names.items() if other != token_id and name == names.get(token_id)]


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _name(text: str) -> str:
    """What the two tokens of a pair have in common: ``think``, ``thought`` of ``<|begin_of_thought|>``."""
    return " ".join(word for word in _words(text) if word not in _OPENING | _CLOSING | {"of"})


def _closes(text: str) -> bool:
    return "/" in text or bool(_CLOSING & set(_words(text)))


def _enclose_turn(text: str, partner: str, rendered: Sequence[str]) -> bool:
    """Whether a conversation holds a message, or a role's name, between the first of a pair and the second."""
    first, second = (partner, text) if _closes(text) else (text, partner)
    for whole in rendered:
        for piece in whole.split(first)[1:]:
            inside, end, _ = piece.partition(second)
            said = SAID["system"] in inside or SAID["user"] in inside
            if end and (said or inside.strip().lower() in _ROLES):
                return True
    return _name(text) in _ROLES


def _bounds_turn(text: str, rendered: Sequence[str], marks: Sequence[str]) -> bool:
    """Whether a token of its own stands at the beginning, behind a turn mark or a role's name, or beside a message."""
    for place in (place for whole in rendered for place in re.finditer(re.escape(text), whole)):
        before, after = place.string[: place.start()].rstrip(), place.string[place.end() :].lstrip()
        role = re.search(r"(?:^|[^\w ])(\w+)$", before)
        beside = before.endswith((*SAID.values(), *marks)) or after.startswith((*SAID.values(),))
        if not before or beside or (role and role[1].lower() in _ROLES):
            return True
    return _name(text) in _ROLES


def conversations() -> list[list[Mapping[str, str]]]:
    """Messages to try a chat template with: some templates refuse the system's."""
    system, user, assistant = ({"role": role, "content": said} for role, said in SAID.items())
    return [[system, user, assistant, user], [user, assistant, user], [user]]
