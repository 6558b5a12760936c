"""Stop texts: which token of a response completes one, for decoders that look after every token or every few dozen.

A text is complete with the first token after which it stands in the decoded response; the token may bring more than
that, and belongs to the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

NO_TEXT = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for bytes that are no character (yet)


class StopTexts:
    """Finds stop texts by decoding no more than the end of a response.

    Of ``decode`` it is assumed that what a token does to the text ends near it: characters may be spread over tokens
    (written as U+FFFD until whole), tokens may decode to nothing, and a text may lose the space that it begins with.
    That holds for byte-level tokenizers and for those that fall back to bytes.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    def ends_at(self, token_ids: Sequence[int], new_from: int, texts: Sequence[str]) -> int | None:
        """How many tokens to keep of a response in which a stop text is complete; None: none is.

        Args:
            token_ids: of the response so far.
            new_from: how many of them have been looked at before, without a find.
            texts: none of them empty or with U+FFFD.
        """
        if not texts or new_from >= len(token_ids):
            return None
        start = self._start(token_ids, new_from, max(map(len, texts)))

        def complete(tail: str) -> bool:
            return any(text in tail for text in texts)

        whole = self._decode(token_ids[start:])
        # a character that is not whole yet may hide what stood there before
        if not (complete(whole) or whole.endswith(NO_TEXT)):
            return None
        ends = range(new_from + 1, len(token_ids) + 1)
        return next((end for end in ends if complete(self._decode(token_ids[start:end]))), None)

    def _start(self, token_ids: Sequence[int], new_from: int, longest: int) -> int:
        """From which token to decode, to find every text that ends in the new tokens.

        More than ``longest`` characters that will stay as they are have to come before those: more, because the first
        one may lack a space before it. Where decoding begins inside of a character the text begins with U+FFFD, and it
        ends so where a character is not whole yet; no stop text holds that.
        """
        count = longest + 2  # tokens; most have a character or more
        while count < new_from:
            start = new_from - count
            if len(self._decode(token_ids[start:new_from]).strip(NO_TEXT)) > longest:
                return start
            count *= 2
        return 0
