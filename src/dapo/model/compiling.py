"""Compiling a model's layers one by one, so that all layers of a kind share one piece of compiled code.

Compiling the whole model would unroll it and take a minute or more; a layer takes seconds, and its code is reused for
every layer, every number of tokens and, through the cache on disk, for the next process.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from dapo.data.cache import cache_folder
from dapo.model.adapters import can_be_compiled
from dapo.model.attention import LAYER_NUMBER

RECOMPILE_LIMIT = 512


def compile_layers(model: Any, **options: Any) -> None:
    """Have ``torch.compile`` compile the decoder layers of ``model`` on their first call, for any number of tokens.

    Attention stays outside of the compiled code (:func:`dapo.model.attention.opaque_attention`). What a layer reads
    about itself becomes part of its code; its number must not, or every layer would be compiled anew, so it travels as
    a tensor. Layers that cannot be traced, those with a DoRA adapter, stay as they are.
    ``model``: from :func:`dapo.model.loading.load_model`, where it is to stay.
    """
    if not can_be_compiled(model):
        return
    import torch._dynamo.config as dynamo  # takes seconds, for which processes without a GPU have no use

    keep_compiled_code()
    # Its limit counts all models of the process, and kinds of layers in each: GPT-2's may all differ.
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(dynamo, name, max(getattr(dynamo, name), RECOMPILE_LIMIT))
    # PyTorch notes for the whole process that one thread is compiling. Another one, which samples meanwhile, then runs
    # what it has compiled as it is written, for these seconds, in place of an error.
    dynamo.error_on_nested_fx_trace = False
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int):
            module.register_buffer(LAYER_NUMBER, torch.tensor(number), persistent=False)
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, fullgraph=True, **options)


def compile_ends(model: Any, **options: Any) -> None:
    """The same for what surrounds the layers in many small kernels: rotary angles and the last norm."""
    for name in ("rotary_emb", "norm"):
        if (module := getattr(model.base_model, name, None)) is not None:
            module.compile(dynamic=True, **options)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of the backbone.
    Raises ValueError: the model has no list of as many modules as its config has layers."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"no list of {count} layers in {type(model).__name__}")


def keep_compiled_code() -> None:
    """Keep compiled code where the next process finds it; a place that the user has set stays."""
    folder = cache_folder("compiled")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
