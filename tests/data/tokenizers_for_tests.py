"""Tiny tokenizers of the kinds that matter: character level, with or without BOS, EOS and chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
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


def byte_tokenizer(*, special=(), added=(), chat_template=None, eos="<|end|>", **roles) -> PreTrainedTokenizerFast:
    """Byte level, without merges; ``special`` and ``added`` tokens as chat models have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (eos, *roles.values(), *special)])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, **roles)
    tokenizer.chat_template = chat_template
    return tokenizer


def sentencepiece_tokenizer(*, special=()) -> PreTrainedTokenizerFast:
    """Words with their space in front, as Llama 2 and Gemma write them."""
    words = ["<unk>", "<s>", "</s>", *special, "▁the", "▁answer", "▁is", "▁8", "8", "▁"]
    core = Tokenizer(models.BPE({word: k for k, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>", *special)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
