"""From a row to the token ids that the model sees. The one place where prompts are tokenized: the length filter, the
rollout and the evaluation all use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.config import DataConfig
from dapo.data.rows import Messages
from dapo.errors import ConfigError, DataError
from dapo.records import Prompt

_DAPO_BEFORE = (
    "Solve the math problem below, thinking step by step. End your response with a line of the form "
    "Answer: $Answer (without quotation marks), where $Answer is the final answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember that the final answer goes on a line of its own after "Answer:".'


class PromptTemplate:
    """Writes prompts as the recipe says. Needs a Hugging Face tokenizer, given as an object.

    The rule for a tokenizer without a chat template (a base model): template ``plain`` is what it is for; ``dapo`` is
    written as plain text, system message, instruction and problem, with nothing around them; ``chat`` is refused,
    unless ``data.chat_template`` names a file. Such a file becomes the tokenizer's chat template, so that it is kept
    with the trained model.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, embedding_rows: int | None = None) -> None:
        """
        Args:
            config: template, instruction and system message.
            tokenizer: with ``__call__``, ``apply_chat_template`` and ``decode`` as Transformers has them.
            embedding_rows: of the model; a prompt with a token beyond them is refused. None: not known.

        Raises:
            ConfigError: template ``chat`` with a tokenizer that has no chat template, or a template file that cannot
                be used.
        """
        self._config = config
        self._tokenizer = tokenizer
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

    def encode(self, prompt: str | Messages) -> list[int]:
        """Token ids of a prompt. With a chat template the template is the authority on special tokens, otherwise the
        tokenizer; either way there is at most one BOS token, and a plain prompt does not end with EOS.

        Raises:
            DataError: the tokenizer's chat template refuses the messages, or the model lacks one of the tokens.
        """
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
        text = repr(self._tokenizer.decode(list(prompt.token_ids)))
        return text if len(text) <= limit else f"{text[: limit - 4]} ..."

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, special tokens left out."""
        ids = [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _take(self, file: str) -> None:
        """Give the tokenizer the chat template in ``file``, and try it."""
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
        """The prompt as chat messages, instruction and system message included."""
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
            # return_dict: Transformers 5 returns a dict by default
            ids = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
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
