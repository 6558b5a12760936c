"""Rows to learn from as they are: demonstrations, preferences, labelled texts.

Consumes tables (``parts.py``) and a way to make token ids of a row; produces :class:`Example` records, drawn as prompts
are (``source.py``): without end, from any position, the first 10,000 rows checked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dapo.config.data import DataConfig
from dapo.config.stages import PairKeys, RewardModelData, SFTData, StageData
from dapo.data.parts import DataInput, Part, Rows, encode, open_parts
from dapo.data.rows import BadRow, Keys, Messages, Row, listed, look_up, plain_value, text_or_messages, unicode_text
from dapo.data.source import PromptSource
from dapo.data.template import SAID, PromptTemplate
from dapo.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Example:
    """Responses to one prompt, as token ids, that are learned from together.

    ``values``: of each response its rank (lower is better) or its label. ``margin``: how far ahead the better one has
    to be. ``learned``: of an only response, which tokens are in the loss; empty: all."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    values: tuple[float, ...] = (0.0,)
    margin: float = 0.0
    learned: tuple[bool, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longest response."""
        return len(self.prompt) + max(map(len, self.responses))


class Texts(NamedTuple):
    """A row of responses as text, otherwise as :class:`Example`."""

    prompt: str | Messages
    responses: tuple[str, ...]
    values: tuple[float, ...]
    margin: float = 0.0


Encode = Callable[[Any], Sequence[Example]]
"""What a raw row is learned as. Raises BadRow: it cannot be used."""


# --- what is in a row ---------------------------------------------------------------------------------------------


def conversation(row: Any, keys: SFTData) -> Messages:
    """The messages of a row, of which the assistant's are imitated. Raises BadRow: there are none."""
    if _holds(_mapping(row), keys.messages_key):
        messages = text_or_messages(row, keys.messages_key, "data.messages_key")
        if isinstance(messages, str):
            raise BadRow(f"{keys.messages_key!r} is text, not a list of chat messages (data.messages_key)")
    else:
        prompt = text_or_messages(row, keys.prompt_key)
        before: Messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        messages = (*before, {"role": "assistant", "content": _text(row, keys.response_key, "data.response_key")})
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise BadRow("no message of the assistant follows another one: there is nothing to imitate")
    return messages


def ranked(row: Any, keys: PairKeys, needs_prompt: bool = True) -> Texts:
    """A pair, or a ranking of K responses. Raises BadRow: there is neither, or no response is better than another."""
    margin = _margin(row, keys) if isinstance(keys, RewardModelData) else 0.0
    if _holds(_mapping(row), keys.responses_key):
        responses = _list(row, keys.responses_key, "data.responses_key", (str,), "texts")
        scores: list[float] = list(range(0, -len(responses), -1))  # the best one first
        if _holds(row, keys.scores_key):
            scores = _list(row, keys.scores_key, "data.scores_key", (int, float), "finite numbers")
        if len(scores) != len(responses):
            raise BadRow(f"{keys.scores_key!r} has {len(scores)} numbers for {len(responses)} responses")
        ranks = tuple(float(sum(other > score for other in scores)) for score in scores)
        if len(set(ranks)) < 2:
            raise BadRow(f"no response in {keys.responses_key!r} is better than another one")
        return Texts(_prompt(row, keys, needs_prompt), tuple(responses), ranks, margin)
    (before, chosen), (other, rejected) = (
        _last_turn(row, getattr(keys, name), f"data.{name}") for name in ("chosen_key", "rejected_key")
    )
    if before != other:
        raise BadRow(f"{keys.chosen_key!r} and {keys.rejected_key!r} answer different conversations")
    return Texts(before or _prompt(row, keys, needs_prompt), (chosen, rejected), (0.0, 1.0), margin)


def labelled(row: Any, keys: RewardModelData) -> Texts:
    """A text, with or without a prompt, and its label. Raises BadRow: one is missing."""
    value = plain_value(look_up(_mapping(row), keys.label_key)[1])
    if value not in (0, 1):
        raise BadRow(f"{keys.label_key!r} must be true or false, or 1 or 0, got {value!r} (data.label_key)")
    text = _text(row, keys.response_key, "data.response_key")
    return Texts(_prompt(row, keys, False), (text,), (float(value),))


def _mapping(row: Any) -> Mapping[Any, Any]:
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object with keys, got {type(row).__name__}")
    return row


def _holds(row: Mapping[Any, Any], key: str) -> bool:
    """Tables hold null where a row leaves a column out."""
    return look_up(row, key)[1] is not None


def _prompt(row: Any, keys: StageData, needed: bool) -> str | Messages:
    return text_or_messages(row, keys.prompt_key) if needed or _holds(row, keys.prompt_key) else ""


def _text(row: Any, key: str, setting: str) -> str:
    found = text_or_messages(row, key, setting)
    if not isinstance(found, str):
        raise BadRow(f"{key!r} must be text ({setting})")
    return found


def _last_turn(row: Any, key: str, setting: str) -> tuple[Messages, str]:
    """What comes before a response, if that is known, and the response."""
    found = text_or_messages(row, key, setting)
    if isinstance(found, str):
        return (), found
    if found[-1]["role"] != "assistant":
        raise BadRow(f"{key!r} must end with a message of the assistant")
    return found[:-1], found[-1]["content"]


def _margin(row: Any, keys: RewardModelData) -> float:
    value = plain_value(look_up(row, keys.margin_key)[1]) if _holds(_mapping(row), keys.margin_key) else 0.0
    if type(value) not in (int, float):
        raise BadRow(f"{keys.margin_key!r} must be a finite number, got {value!r} (data.margin_key)")
    return float(value)


def _list(row: Any, key: str, setting: str, types: tuple[type, ...], what: str) -> list[Any]:
    found = plain_value(look_up(row, key)[1])
    if not isinstance(found, list) or not all(type(one) in types and one != "" for one in found):
        raise BadRow(f"{key!r} must be a list of {what} ({setting})")
    return [unicode_text(one, key) if isinstance(one, str) else one for one in found]


# --- as the policy reads and writes it ----------------------------------------------------------------------------


class PolicyText:
    """Makes token ids as the rollout does: a prompt by the template, a response with the token that ends it, so that
    what is learned is what would be sampled."""

    def __init__(self, template: PromptTemplate, tokenizer: Any, chat: bool) -> None:
        """``chat``: whether prompts are written by the chat template.
        Raises ConfigError: no token ends a response."""
        self._template, self._tokenizer = template, tokenizer
        ends = {int(i) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        self.end = tokenizer.eos_token_id
        if chat and getattr(tokenizer, "chat_template", None):
            user, said = ({"role": role, "content": SAID[role]} for role in ("user", "assistant"))
            tail = str(template.apply([user, said], tokenize=False)).rpartition(SAID["assistant"])[2]
            first = tokenizer(tail, add_special_tokens=False)["input_ids"][:1] if tail else []
            self.end = first[0] if ends.intersection(first) else self.end
        if self.end is None:
            raise ConfigError("model.tokenizer: names no token that ends a text (eos_token), so none ends a response")

    def response(self, text: str) -> tuple[int, ...]:
        """A text that has the end token already does not get a second one."""
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        while ids and ids[-1] in (self.end, self._tokenizer.eos_token_id):
            ids.pop()
        return (*ids, self.end)

    def responses(self, texts: Texts) -> Example:
        """Raises BadRow: the template refuses the prompt."""
        return Example(
            tuple(self._prompt(texts.prompt)), tuple(map(self.response, texts.responses)), texts.values, texts.margin
        )

    def read_back(self, prompt: str | Messages, response: str) -> str:
        """What is left of the two in tokens. Raises BadRow: the template refuses the prompt."""
        return str(self._tokenizer.decode([*self._prompt(prompt), *self.response(response)]))

    def pieces(self, messages: Messages) -> Iterator[Example]:
        """A conversation as one example in which only the assistant's messages are learned. Where the template does not
        write a longer conversation as the shorter one with something behind it, another example begins."""
        ids: list[int] = []
        learned: list[bool] = []
        start = 0
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or not place:
                continue
            context, response = self._prompt(messages[:place]), self.response(message["content"])
            if start and context[: len(ids)] == ids:
                learned += [False] * (len(context) - len(ids))
            else:
                if start:
                    yield _demonstration(ids, start, learned)
                start, learned = len(context), []
            ids = [*context, *response]
            learned += [True] * len(response)
        yield _demonstration(ids, start, learned)

    def _prompt(self, prompt: str | Messages) -> list[int]:
        return list(encode(Row(prompt, None), self._template))


def _demonstration(ids: Sequence[int], start: int, learned: Sequence[bool]) -> Example:
    return Example(tuple(ids[:start]), (tuple(ids[start:]),), learned=tuple(learned))


# --- one after the other ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ExampleRow(Row):
    """A row whose prompt is its examples."""

    @property
    def text(self) -> str:
        return self.place

    def doubts(self, keys: Keys) -> Iterator[tuple[str, str]]:
        return iter(())


class ExampleRows(Rows):
    """The first ``limit`` rows of several parts, as examples."""

    def __init__(self, parts: Sequence[Part], encode: Encode, limit: int | None) -> None:
        super().__init__(parts)
        self._encode, self._limit = encode, limit

    def __len__(self) -> int:
        return min(super().__len__(), self._limit or super().__len__())

    def __getitem__(self, number: int) -> Row:
        part, inside = self._find(number)
        examples: Any = tuple(self._encode(part.table.raw(inside)))
        if any(len({*zip(one.responses, one.values, strict=True)}) > len({*one.responses}) for one in examples):
            raise BadRow("two responses, one of them better, are the same as token ids: nothing can be learned")
        return _ExampleRow(examples, None, {"examples": examples}, part.table.place(inside))


class _Lengths:
    """In place of a template: a row has the tokens of its longest example."""

    def encode(self, examples: Sequence[Example]) -> Sequence[int]:
        return range(max(one.longest for one in examples))

    def encode_all(self, rows: Sequence[Sequence[Example]]) -> list[Sequence[int]]:
        return [*map(self.encode, rows)]

    def end(self, ids: Sequence[int]) -> str:
        return ""


def open_examples(
    source: DataInput, encode: Encode, data: StageData, seed: int, tell: Callable[[str], None]
) -> PromptSource:
    """Rows to draw from; each draw has its examples in ``meta``. Those that cannot be used are told, and left out.
    Raises DataError: as :func:`dapo.data.source.load_prompts`."""
    settings = _settings(data)
    parts, weights = open_parts(settings, source, False)
    streams = [ExampleRows(one, encode, data.rows) for one in ([[part] for part in parts] if weights else [parts])]
    template: Any = _Lengths()
    try:
        found = PromptSource(streams, template, settings, seed=seed, weights=weights, warn=tell)
    except DataError as error:
        raise DataError(str(error).replace("max_prompt_length", "max_length").replace("prompt is", "row is")) from None
    for count, why in (
        (found.report.bad, "bad"),
        (found.report.too_long, f"longer than data.max_length={data.max_length}"),
    ):
        if count:
            tell(f"data.train: {count:,} of the first {found.report.checked:,} rows are {why}; they are left out")
    return found


def read_examples(
    source: DataInput, encode: Encode, data: StageData, limit: int | None, tell: Callable[[str], None]
) -> tuple[list[Example], dict[str, Any]]:
    """Held-out rows, in their order, and their fingerprint. Raises DataError: a row is bad; names all of them."""
    parts, _ = open_parts(_settings(data), source, False)
    rows, faults = ExampleRows(parts, encode, limit), list[str]()
    found: list[Example] = []
    for number in range(len(rows)):
        try:
            found += rows[number].meta["examples"]
        except BadRow as fault:
            faults.append(f"{rows.place(number)}: {fault}")
    if faults:
        raise DataError(listed(faults))
    fitting = [one for one in found if one.longest <= data.max_length]
    if left_out := len(found) - len(fitting):
        tell(f"evaluation.data: {left_out} rows are longer than data.max_length={data.max_length}; they are left out")
    return fitting, {part.label: part.fingerprint() for part in parts}


def _settings(data: StageData) -> DataConfig:
    shared = data.model_dump(include={"on_bad_row", "max_bad_rows", "shuffle"})
    return DataConfig(max_prompt_length=data.max_length, **shared)
