"""Tiny tokenizers of the kinds that matter: character level, with or without BOS, EOS and chat template."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT


def char_tokenizer(*, adds_bos=False, adds_eos=False, chat_template=None) -> PreTrainedTokenizerFast:
    """Every printable ASCII character and the newline is a token."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {token: k for k, token in enumerate(["<s>", "<e>", *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if adds_bos or adds_eos:
        single = " ".join(["<s>"] * adds_bos + ["$A"] + ["<e>"] * adds_eos)
        special = [(token, vocab[token]) for token in ("<s>", "<e>")]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<e>")
    tokenizer.chat_template = chat_template
    return tokenizer
