"""Rows to learn from as they are: demonstrations, preferences, labelled texts.

Consumes tables (``parts.py``) and a way to make token ids of a row; produces :class:`Example` records, without end and
from any position. The first 10,000 rows are checked at once, the others when they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config.data import DataItem
from dapo.config.stages import PairKeys, RewardModelData, SFTData, StageData
from dapo.data.order import Permutation
from dapo.data.parts import CHECKED_ROWS, Part, Rows, names_of, open_table
from dapo.data.rows import BadRow, Keys, Messages, PythonRows, Table, listed, look_up, plain_value, text_or_messages
from dapo.data.template import SAID, PromptTemplate
from dapo.errors import ConfigError, DataError
from dapo.util.differences import differences


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


@dataclass(frozen=True, slots=True)
class Texts:
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
    if look_up(_mapping(row), keys.messages_key)[0]:
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
    margin = _number(row, keys.margin_key) if isinstance(keys, RewardModelData) else None
    there, responses = look_up(_mapping(row), keys.responses_key)
    if there:
        responses = plain_value(responses)
        if not isinstance(responses, list) or not all(isinstance(one, str) and one.strip() for one in responses):
            raise BadRow(f"{keys.responses_key!r} must be a list of texts (data.responses_key)")
        ranks = _ranks(row, keys, len(responses))
        if len(set(ranks)) < 2:
            raise BadRow(f"no response in {keys.responses_key!r} is better than another one")
        return Texts(_prompt(row, keys, needs_prompt), tuple(responses), ranks, margin or 0.0)
    (before, chosen), (other, rejected) = (
        _last_turn(row, getattr(keys, name), f"data.{name}") for name in ("chosen_key", "rejected_key")
    )
    if before != other:
        raise BadRow(f"{keys.chosen_key!r} and {keys.rejected_key!r} answer different conversations")
    if chosen == rejected:
        raise BadRow(f"{keys.chosen_key!r} and {keys.rejected_key!r} are the same")
    return Texts(before or _prompt(row, keys, needs_prompt), (chosen, rejected), (0.0, 1.0), margin or 0.0)


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


def _prompt(row: Any, keys: StageData, needed: bool) -> str | Messages:
    return text_or_messages(row, keys.prompt_key) if needed or look_up(row, keys.prompt_key)[0] else ""


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


def _number(row: Any, key: str) -> float | None:
    there, value = look_up(_mapping(row), key)
    value = plain_value(value)
    if there and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise BadRow(f"{key!r} must be a finite number, got {value!r}")
    return float(value) if there else None


def _ranks(row: Any, keys: PairKeys, count: int) -> tuple[float, ...]:
    there, scores = look_up(row, keys.scores_key)
    if not there:
        return tuple(map(float, range(count)))
    scores = plain_value(scores)
    if not isinstance(scores, list) or len(scores) != count or not all(type(s) in (int, float) for s in scores):
        raise BadRow(f"{keys.scores_key!r} must be {count} finite numbers, one for each response (data.scores_key)")
    return tuple(float(sum(other > score for other in scores)) for score in scores)


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
            raise ConfigError(
                "model.tokenizer: names no token that ends a text (eos_token), so none could end a response"
            )

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
        try:
            ids = self._template.encode(prompt)
        except DataError as error:
            raise BadRow(" ".join(str(error).split())) from None
        if not ids:
            raise BadRow("the tokenizer makes no tokens of the prompt")
        return ids


def _demonstration(ids: Sequence[int], start: int, learned: Sequence[bool]) -> Example:
    return Example(tuple(ids[:start]), (tuple(ids[start:]),), learned=tuple(learned))


# --- one after the other ------------------------------------------------------------------------------------------


class _RawRows(Rows):
    def raw(self, number: int) -> Any:
        part, inside = self._find(number)
        return part.table.raw(inside)

    def first(self, limit: int | None) -> int:
        """How many of them are used."""
        return min(len(self), limit or len(self))


def open_rows(source: Sequence[DataItem] | Table | Sequence[Mapping[str, Any]]) -> _RawRows:
    """Raises DataError: there are none, or a file cannot be read."""
    if not isinstance(source, Table) and source and not isinstance(source[0], DataItem):
        source = PythonRows(list(source), "rows")  # type: ignore[arg-type]
    if isinstance(source, Table):
        return _RawRows([Part(source, Keys(), "rows")])
    if not source:
        raise DataError("data.train: no rows are given; files of rows to train on (JSONL, Parquet)")
    items = [(item, open_table(item)) for item in source if isinstance(item, DataItem)]
    return _RawRows([Part(table, Keys(), f"{n} {item.path}") for n, (item, table) in enumerate(items, start=1)])


class ExampleSource:
    """Rows to draw from, without end: each epoch holds every usable row once.

    Attributes:
        bad, too_long: rows that were left out so far.
    """

    def __init__(
        self, rows: _RawRows, encode: Encode, data: StageData, seed: int, tell: Callable[[str], object]
    ) -> None:
        """Raises DataError: as ``data.on_bad_row`` says, or no row is left."""
        self._rows, self._encode, self._data, self._seed = rows, encode, data, seed
        self._count = rows.first(data.rows)
        self.bad = self.too_long = 0
        self.seen = 0
        faults: list[str] = []
        checked = min(len(self), CHECKED_ROWS)
        for number in range(checked):
            self._usable(number, faults)
        what = f"{names_of(rows)}: of the first {checked:,} rows"
        if faults and (data.on_bad_row == "fail" or len(faults) > data.max_bad_rows * checked):
            raise DataError(listed(faults))
        if len(faults) + self.too_long == checked:
            raise DataError(
                f"{what} none can be used: {self.too_long} are longer than data.max_length={data.max_length}"
            )
        for count, why in (
            (len(faults), "are bad"),
            (self.too_long, f"are longer than data.max_length={data.max_length}"),
        ):
            if count:
                tell(f"{what} {count:,} {why}; they are left out")
        self.bad = self.too_long = 0
        self._go_to(0, 0)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = Permutation(self._count, self._seed, "rows", 0, epoch) if self._data.shuffle else None

    def __len__(self) -> int:
        return self._count

    def next(self) -> Sequence[Example]:
        """The examples of the next row that can be used.
        Raises DataError: a row is bad and ``data.on_bad_row`` is ``fail``, too many are, or none can be used."""
        faults: list[str] = []
        for _ in range(2 * self._count):  # wherever it stands, these hold a whole epoch
            if self._position == self._count:
                self._go_to(self._epoch + 1, 0)
            number = self._position if self._order is None else self._order[self._position]
            self._position += 1
            self.seen += 1
            if found := self._usable(number, faults):
                return found
            if faults and self._data.on_bad_row == "fail":
                raise DataError(f"{faults[-1]}\n(data.on_bad_row=skip goes on without such rows)")
            if self.bad > self._data.max_bad_rows * max(self.seen, CHECKED_ROWS):
                raise DataError(f"{faults[-1]}\nThis is bad row {self.bad} of {self.seen} (data.max_bad_rows)")
        raise DataError(f"{names_of(self._rows)}: none of the {self._count} rows can be used")

    def _usable(self, number: int, faults: list[str]) -> Sequence[Example]:
        """Of a row; counts what cannot be used."""
        try:
            found = self._encode(self._rows.raw(number))
        except BadRow as fault:
            faults.append(f"{self._rows.place(number)}: {fault}")
            self.bad += 1
            return ()
        fitting = [one for one in found if one.longest <= self._data.max_length]
        self.too_long += len(fitting) < len(found)
        return fitting

    @property
    def epoch(self) -> float:
        """Passes over the rows so far."""
        return self._epoch + self._position / self._count

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {part.label: part.fingerprint() for part in self._rows.parts}

    def state(self) -> dict[str, Any]:
        """The position, in JSON types."""
        counts = {"seen": self.seen, "bad": self.bad, "too_long": self.too_long}
        return {"epoch": self._epoch, "position": self._position, **counts, "data": self.fingerprint}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that :meth:`state` gave. Raises DataError: it was given over other data."""
        if changes := [str(found) for found in differences(state["data"], self.fingerprint)]:
            raise DataError("the data has changed since the checkpoint:\n" + "\n".join(changes))
        self.seen, self.bad, self.too_long = state["seen"], state["bad"], state["too_long"]
        self._go_to(state["epoch"], state["position"])


def read_examples(rows: _RawRows, encode: Encode, data: StageData, limit: int | None) -> tuple[list[Example], int]:
    """Held-out rows, in their order, and how many were left out as too long.
    Raises DataError: a row is bad; names all of them."""
    faults: list[str] = []
    found: list[Example] = []
    for number in range(rows.first(limit)):
        try:
            found += encode(rows.raw(number))
        except BadRow as fault:
            faults.append(f"{rows.place(number)}: {fault}")
    if faults:
        raise DataError(listed(faults))
    fitting = [one for one in found if one.longest <= data.max_length]
    return fitting, len(found) - len(fitting)
