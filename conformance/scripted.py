"""A real language model whose every next token is known: for cases about stop tokens, padding and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def chain_model(chain: Mapping[int, int], vocabulary: int, eos: Sequence[int], pad: int) -> Any:
    """A Llama in Transformers after whose token ``a`` comes ``chain[a]`` with a probability of 1 in float32.

    Attention and MLP write nothing (their output projections are 0), so the last hidden state is the embedding of the
    last token, which is one-hot; the head holds the chain.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2 * ((vocabulary + 1) // 2)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=list(eos),
            pad_token_id=pad,
        )
    )
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, width))
        model.lm_head.weight.zero_()
        for token, follower in chain.items():
            model.lm_head.weight[follower, token] = 100.0
    model.generation_config.eos_token_id = list(eos)
    return model.eval()


def word_tokenizer(vocabulary: int, eos: int, pad: int) -> Any:
    """A tokenizer whose words are ``t0``, ``t1``, ...: token i is word i."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{pad}", eos_token=f"t{eos}")
