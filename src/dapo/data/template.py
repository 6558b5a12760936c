"""From a row to the token ids that the model sees. The one place where prompts are tokenized: the length filter, the
rollout and the evaluation all use it.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from dapo.config import DataConfig
from dapo.config.data import NO_VARIABLES
from dapo.data.control import control_ids, conversations
from dapo.data.rows import Messages
from dapo.errors import ConfigError, DataError, shortened
from dapo.records import Prompt

_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
"""The wording of the released training data (DAPO-Math-17k), to the letter."""
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_END_TOKENS, _END_CHARACTERS = 256, 1000
"""Of the end of a prompt: what is looked through for it, and the most of it that is told."""


class PromptTemplate:
    """Writes prompts as the recipe says. Needs a Hugging Face tokenizer, given as an object.

    The rule for a tokenizer without a chat template (a base model): template ``plain`` is what it is for; ``dapo`` is
    written as plain text, system message, instruction and problem, with nothing around them; ``chat`` is refused,
    unless ``data.chat_template`` names a file. Such a file becomes the tokenizer's chat template, so that it is kept
    with the trained model."""

    def __init__(self, config: DataConfig, tokenizer: Any, embedding_rows: int | None = None) -> None:
        """``tokenizer``: with ``__call__``, ``apply_chat_template`` and ``decode`` as Transformers has them.
        ``embedding_rows``: of the model; a prompt with a token beyond them is refused. None: not known.
        Raises ConfigError: template ``chat`` with a tokenizer that has no chat template, a template file that cannot be
        used, or ``data.chat_template_kwargs`` that the template does not know."""
        self._config = config
        self._tokenizer = tokenizer
        self._stop_ids: tuple[int, ...] = ()
        self._how: dict[str, Any] = dict(config.chat_template_kwargs)
        self.embedding_rows = embedding_rows
        if config.chat_template is not None:
            self._take(config.chat_template)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.template == "chat" and not has_template:
            raise ConfigError(
                "data.template: is chat, but the tokenizer has no chat template (a base model?); use "
                "data.template=plain, or a tokenizer that has one (model.tokenizer), or name a file with one "
                "(data.chat_template)"
            )
        self._uses_chat = config.template != "plain" and has_template
        text = tokenizer.get_chat_template() if has_template else ""
        self.today: date | None = None
        """What the chat template takes for today; None: it does not ask."""
        if self._uses_chat and "strftime_now" in text:
            self.today = config.today or date.today()
            self._how["chat_template"] = _with_date(text, self.today)
        self._check_kwargs(text)

    def encode(self, prompt: str | Messages) -> list[int]:
        """Token ids of a prompt. With a chat template the template is the authority on special tokens, otherwise the
        tokenizer; either way there is at most one BOS token, and a plain prompt does not end with EOS.
        Raises DataError: the tokenizer's chat template refuses the messages, or the model lacks one of the tokens."""
        messages = self._messages(prompt)
        if self._uses_chat:
            return self._known(self._one_bos(self._chat_ids(messages)))
        text = "\n\n".join(message["content"] for message in messages)
        ids = list(self._tokenizer(text, add_special_tokens=True)["input_ids"])
        return self._known(self._one_bos(self._without_eos(ids)))

    def _known(self, ids: list[int]) -> list[int]:
        if ids and self.embedding_rows is not None and max(ids) >= self.embedding_rows:
            raise DataError(
                f"the prompt, template included, holds {self._tokenizer.convert_ids_to_tokens(max(ids))!r}, which is "
                f"token {max(ids)}, but the model's embedding has {self.embedding_rows} rows: leave it out, or give "
                "the model a row for it (resize_token_embeddings)"
            )
        return ids

    def show(self, prompt: Prompt, limit: int = 300) -> str:
        """The prompt as the model gets it, special tokens and all, quoted and cut to ``limit`` characters."""
        return shortened(repr(self._tokenizer.decode(list(prompt.token_ids))), limit, " ...")

    def ends_with(self, stop_ids: Iterable[int]) -> None:
        """Take note of the tokens that end a response, which the tokenizer alone need not know (``control.py``)."""
        self._stop_ids = tuple(stop_ids)
        self.__dict__.pop("control", None)

    @cached_property
    def control(self) -> frozenset[int]:
        rendered: list[str] = []
        for messages in conversations() if getattr(self._tokenizer, "chat_template", None) else ():
            with suppress(Exception):  # templates raise their own kinds, such as for roles that they do not know
                rendered.append(str(self.apply(messages, tokenize=False)))
        return control_ids(self._tokenizer, rendered, self._stop_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response: of all its tokens but the control tokens, which are no part of what is said."""
        return self.text(token for token in token_ids if token not in self.control)

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, control tokens too. An id that the tokenizer does not have (models have rows without a
        token) is U+FFFD, as what stands on its two sides is not one text."""
        parts = groupby(map(int, token_ids), self._has_token)
        return "".join(self._plain([*ids]) if there else "\ufffd" * len([*ids]) for there, ids in parts)

    def _has_token(self, token_id: int) -> bool:
        return token_id in self._vocabulary or bool(self._plain([token_id]))  # which has each text but once

    @cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_vocab().values())

    def _plain(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def end(self, prompt_ids: Sequence[int]) -> str:
        """What a response goes on from: the text of a prompt behind its last control token."""
        tail = list(prompt_ids[-_END_TOKENS:])
        last = max((place for place, token in enumerate(tail) if token in self.control), default=-1)
        return self.decode(tail[last + 1 :])[-_END_CHARACTERS:]

    def apply(self, messages: Sequence[Mapping[str, str]], **how: Any) -> Any:
        """The tokenizer's chat template, with what the recipe gives it. ``how``: as Transformers has it."""
        return self._tokenizer.apply_chat_template(list(messages), return_dict=False, **self._how, **how)

    def _check_kwargs(self, text: str) -> None:
        """Raises ConfigError: a variable is given that the chat template does not have, so that nothing would come of
        it."""
        given = self._config.chat_template_kwargs
        if given and not self._uses_chat:
            why = "data.template is plain" if text else "the tokenizer has no chat template"
            raise ConfigError(f"data.chat_template_kwargs: {', '.join(given)}: there is none to give it to: {why}")
        known = _variables(text) if given else set()
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"its variables are {', '.join(sorted(known)) or 'none'}"
                raise ConfigError(f"data.chat_template_kwargs.{name}: the chat template has no such variable; {hint}")

    def _take(self, file: str) -> None:
        try:
            self._tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"data.chat_template: cannot read {file!r}: {error.strerror or error}") from None
        except ValueError:
            raise ConfigError(f"data.chat_template: {file!r} is not a text file in UTF-8") from None
        try:
            self._chat_ids([{"role": "user", "content": "2+2="}])
        except DataError as error:
            raise ConfigError(f"data.chat_template: {file}: {error}") from None

    def _messages(self, prompt: str | Messages) -> list[Mapping[str, str]]:
        config = self._config
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        last = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
        if config.template == "dapo":
            last["content"] = _DAPO_BEFORE + last["content"] + _DAPO_AFTER
        elif config.instruction:
            last["content"] += config.instruction
        has_system = messages[0]["role"] == "system"
        if config.system is not None and config.template != "plain" and not has_system:
            messages.insert(0, {"role": "system", "content": config.system})
        return list(messages)

    def _chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        try:
            ids = self.apply(messages, tokenize=True, add_generation_prompt=True)
        except Exception as error:  # templates raise their own kinds, such as for a role that they do not know
            raise DataError(f"the tokenizer's chat template refuses the prompt: {error}") from None
        return list(ids)

    def _without_eos(self, ids: list[int]) -> list[int]:
        """Some tokenizers end every text with EOS; a response to that would be a response to nothing."""
        eos, bos = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        while ids and ids[-1] == eos and (len(ids) > 1 or eos != bos):
            ids = ids[:-1]
        return ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Templates that write the BOS themselves and tokenizers that add one must not add up to two."""
        bos = self._tokenizer.bos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        return ids


def lost_letters(prompt: Prompt, tokenizer: Any) -> list[str]:
    """Letters of a prompt that its tokens do not hold, case and compatible forms apart."""
    said = re.sub(r"^(system|user|assistant): ", "", prompt.text, flags=re.MULTILINE)
    seen = tokenizer.decode(list(prompt.token_ids))
    there, here = (set(unicodedata.normalize("NFKC", text).casefold()) for text in (said, seen))
    return sorted(letter for letter in there - here if letter.isprintable() and not letter.isspace())[:20]


def _with_date(template: str, today: date) -> str:
    """A chat template whose ``strftime_now`` tells of ``today``, at midnight: a prompt must not change under a run."""
    day = datetime.combine(today, time())
    filled = "".join(
        f"|replace({said!r}, {day.strftime(said)!r})" for said in {*re.findall("%[-_0^#]?[A-Za-z]", template)}
    )
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{filled} }}}}{{% endmacro %}}"
    return f"{macro}\n{template}"  # Jinja takes the line end after a block away


def _variables(template: str) -> set[str]:
    from jinja2 import TemplateError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment  # it knows the tags that Transformers adds
        return meta.find_undeclared_variables(environment.parse(template)) - NO_VARIABLES
    except TemplateError as error:
        raise ConfigError(f"data.chat_template_kwargs: the tokenizer's chat template is broken: {error}") from None
