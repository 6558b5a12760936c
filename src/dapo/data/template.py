"""From a row to the token ids that the model sees. The one place where prompts are tokenized: the length filter, the
rollout and the evaluation all use it."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from dapo.config import DataConfig
from dapo.config.data import NO_VARIABLES
from dapo.data.rows import BadRow, Messages
from dapo.errors import ConfigError, DataError, shortened
from dapo.records import Prompt

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


def _enclose_turn(text: str, partner: str, rendered: Sequence[str]) -> bool:
    """Whether a conversation holds a message, or a role's name, between the first of a pair and the second."""
    closes = "/" in text or bool(_CLOSING & set(_words(text)))
    first, second = (partner, text) if closes else (text, partner)
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


_DAPO_BEFORE = "Solve the following math problem step by step. The last line of your response should be of the form "
_DAPO_BEFORE += "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
"""The wording of the released training data (DAPO-Math-17k), to the letter."""
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_CARRIED = re.compile(r"\banswer:\s*\$answer\b", re.IGNORECASE)
_TELLING = 20
"""Characters from which on an instruction does not stand in the middle of a prompt by accident."""
_END_TOKENS, _END_CHARACTERS = 256, 1000
"""Of the end of a prompt: what is looked through for it, and the most of it that is told."""


def carries_instruction(prompt: str, instruction: str | None = None) -> bool:
    """Whether a row holds ``instruction`` by itself; None: an answer line, as DAPO-Math-17k and AIME-2024 ask for."""
    if instruction is None:
        return _CARRIED.search(prompt) is not None
    return prompt.rstrip().endswith(instruction) or (len(instruction) >= _TELLING and instruction in prompt)


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
        if self._uses_chat:  # and not as one of several: not every class of tokenizers takes those
            return self._checked(self._chat_ids(self.messages(prompt)))
        return self.encode_all([prompt])[0]

    def encode_all(self, prompts: Sequence[str | Messages]) -> list[list[int]]:
        """As :meth:`encode` for each, at once, for which a fast tokenizer takes all cores. Raises DataError: of one."""
        every = [self.messages(prompt) for prompt in prompts]
        if self._uses_chat:
            return [self._checked(list(ids)) for ids in self._chat_ids(every)]
        return self._text_ids(["\n\n".join(message["content"] for message in messages) for messages in every])

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text as it is, without a template. Raises DataError: the model lacks one of the tokens."""
        return self._text_ids([text])[0]

    def _text_ids(self, texts: list[str]) -> list[list[int]]:
        eos, bos = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        made = self._tokenizer(texts, add_special_tokens=True)["input_ids"] if texts else []
        every = [list(ids) for ids in made]
        for ids in every:
            while ids and ids[-1] == eos and (len(ids) > 1 or eos != bos):  # some tokenizers end every text with it
                ids.pop()
        return [*map(self._checked, every)]

    def _checked(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:  # of the template and of the tokenizer
            ids = ids[1:]
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
        """Take note of the tokens that end a response, which the tokenizer alone need not know."""
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
        control = self.control
        return self._text([token for token in token_ids if token not in control])

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, control tokens too. An id that the tokenizer does not have (models have rows without a
        token) is U+FFFD, as what stands on its two sides is not one text."""
        return self._text([*map(int, token_ids)])

    def _text(self, token_ids: list[int]) -> str:
        if self._vocabulary.issuperset(token_ids):  # at once: it is asked for often
            return self._plain(token_ids)
        # the vocabulary has each text but once
        parts = groupby(token_ids, lambda one: one in self._vocabulary or bool(self._plain([one])))
        return "".join(self._plain([*ids]) if there else "\ufffd" * len([*ids]) for there, ids in parts)

    @cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_vocab().values())

    def _plain(self, ids: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _backend(self) -> Any:
        """What Transformers' ``decode`` ends in after a look at each token's type, which takes nearly as long; None:
        the tokenizer has a way of its own."""
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(self._tokenizer)
        same = issubclass(kind, Fast) and all(getattr(kind, n) is getattr(Fast, n) for n in ("decode", "_decode"))
        return self._tokenizer.backend_tokenizer if same else None

    def end(self, prompt_ids: Sequence[int]) -> str:
        """What a response goes on from: the text of a prompt behind its last control token."""
        tail = list(prompt_ids[-_END_TOKENS:])
        last = max((place for place, token in enumerate(tail) if token in self.control), default=-1)
        return self.decode(tail[last + 1 :])[-_END_CHARACTERS:]

    def apply(self, messages: Sequence[Any], **how: Any) -> Any:
        """The tokenizer's chat template, with what the recipe gives it, for one conversation or a list of several.
        ``how``: as Transformers has it."""
        return self._tokenizer.apply_chat_template(list(messages), return_dict=False, **self._how, **how)

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """The text of a conversation up to where the model is to speak; without a chat template what is said, one after
        the other. Raises DataError: the template refuses the messages."""
        if not self._uses_chat:
            return "".join(str(message["content"]) for message in messages)
        try:
            return str(self.apply(messages, tokenize=False, add_generation_prompt=True, tools=list(tools) or None))
        except Exception as error:  # templates raise their own kinds
            raise DataError(f"the tokenizer's chat template refuses the conversation: {error}") from None

    def without_special(self, text: str) -> str:
        """Text that others have written, such as web pages: names of special tokens in it are broken by a space."""
        return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if self._special else text

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        names = [str(token.content) for i, token in added.items() if token.special or int(i) in self.control]
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None

    def continuing_ids(self, text: str) -> list[int]:
        """Token ids of a text with the control tokens in it, to which nothing is added."""
        return self._checked(list(self._tokenizer(text, add_special_tokens=False)["input_ids"]))

    @cached_property
    def source(self) -> str:
        """The chat template; empty: none is used."""
        return str(self._tokenizer.get_chat_template()) if self._uses_chat else ""

    def _check_kwargs(self, text: str) -> None:
        """Raises ConfigError: a variable is given that the chat template does not have."""
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

    def messages(self, prompt: str | Messages) -> list[Mapping[str, str]]:
        """A prompt as messages, with what the recipe puts around it."""
        config = self._config
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        last = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
        said = last["content"]
        if config.template == "dapo":
            last["content"] = said if carries_instruction(said) else _DAPO_BEFORE + said + _DAPO_AFTER
        elif not carries_instruction(said, config.instruction.strip()):
            last["content"] += config.instruction
        if config.system is not None and config.template != "plain" and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system})
        return list(messages)

    def _chat_ids(self, messages: Sequence[Any]) -> list[Any]:
        try:
            ids = self.apply(messages, tokenize=True, add_generation_prompt=True)
        except Exception as error:  # templates raise their own kinds, such as for a role that they do not know
            raise DataError(f"the tokenizer's chat template refuses the prompt: {error}") from None
        return list(ids)


def lost_letters(text: str, seen: str) -> list[str]:
    """Letters of a text that are not in what is ``seen`` of it, its tokens decoded; case and compatible forms apart."""
    said = re.sub(r"^(system|user|assistant): ", "", text, flags=re.MULTILINE)
    lost = letters(said) - letters(seen)
    return sorted(letter for letter in lost if letter.isprintable() and not letter.isspace())[:20]


def letters(text: str) -> set[str]:
    """Those of a text, whatever their case, compatible forms as one."""
    return set(unicodedata.normalize("NFKC", text).casefold())


def letters_lost_in(texts: Iterable[tuple[str, str]], read_back: Callable[[str, str], str]) -> set[str]:
    """Of prompts with responses, of which ``read_back`` says what is left in tokens. Each letter is tried once."""
    tried, lost = set[str](), set[str]()
    for prompt, response in texts:
        with suppress(BadRow):  # the prompt is refused, which its score says
            if not tried.issuperset(text := f"{prompt}\n{response}"):
                lost.update(lost_letters(text, read_back(prompt, response)))
                tried.update(text)
    return lost


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
