"""From prompt and response to the token ids that a reward model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dapo.errors import RewardError

Template = Literal["chat", "plain", "pair"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """``token_types``: of a pair of texts, of the same length, where the model tells the two apart."""

    token_ids: tuple[int, ...]
    token_types: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.token_ids)


class PairText:
    """Writes prompt and response as the recipe says. ``tokenizer``: as of Transformers.

    A response cannot contain the tokenizer's control tokens (end of turn, start of another role): a policy that writes
    them as ordinary text could otherwise show the reward model another conversation.
    Raises RewardError: the tokenizer has no chat template, or one that refuses a prompt and a response."""

    def __init__(self, tokenizer: Any, template: Template, name: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        control = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._control = sorted((token for token in control if len(token) > 1), key=len, reverse=True)
        if template != "chat":
            return
        if not getattr(tokenizer, "chat_template", None):
            raise RewardError(
                f"reward.template: is chat, but the tokenizer {name} has no chat template; use reward.template=plain "
                "(or pair), or name a tokenizer that has one (reward.tokenizer)"
            )
        try:
            self.encode("2+2=", "4")
        except Exception as error:  # templates raise their own kinds
            raise RewardError(
                f"the chat template of the tokenizer {name} refuses prompt and response: {error}"
            ) from None

    def encode(self, prompt: str, response: str) -> Encoded:
        response = self._without_control(response)
        if self._template == "chat":
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            # the template is the authority on special tokens; return_dict: Transformers 5 returns a dict by default
            ids = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, tokenizer_kwargs={"verbose": False}
            )
            return Encoded(self._one_bos(ids))
        if self._template == "plain":
            found = self._tokenizer(prompt + response, add_special_tokens=True, verbose=False)
            return Encoded(self._one_bos(found["input_ids"]))
        found = self._tokenizer(prompt, response, add_special_tokens=True, verbose=False)
        return Encoded(tuple(found["input_ids"]), tuple(found.get("token_type_ids", ())))

    def read_back(self, prompt: str, response: str) -> str:
        return str(self._tokenizer.decode(list(self.encode(prompt, response).token_ids)))

    def _without_control(self, text: str) -> str:
        """``text`` with a space inside of each control token."""
        for token in self._control:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _one_bos(self, ids: list[int]) -> tuple[int, ...]:
        """One BOS, where both the template and the tokenizer add one."""
        bos = self._tokenizer.bos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        return tuple(ids)
