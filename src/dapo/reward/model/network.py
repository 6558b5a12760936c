"""The network of a reward model: loading, refusing what would score wrongly, and scores for a batch.

Consumes token ids of different lengths, produces one float for each. Sequences are padded on the right. Where a
network reads its score off a token, that token is found from the sequence itself, so that neither padding nor the other
sequences of a batch can move it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dapo.config import ModelReward
from dapo.errors import ModelError, RewardError, first_line
from dapo.model.hub import from_where
from dapo.model.loading import context_limit, load_tokenizer
from dapo.reward.model.text import Encoded, PairText
from dapo.reward.model.value_head import FILE, load_value_head

_HARMLESS = ("lm_head.", "cls.")
"""Weights of language model heads, which reward models are made from and need no more."""
_PROBES = (("2+2=", "4"), ("Name three primes.", "2, 3 and 5 are the three smallest ones; 1 is none."))
"""Texts of two lengths that a network is tried with."""

Batch = dict[str, torch.Tensor]
Forward = Callable[[Batch, Sequence[Encoded]], torch.Tensor]


class RewardNetwork:
    """A network and its tokenizer. Not thread-safe: tokenizing and scoring may go on in two threads, but one each.

    Args:
        text: how prompt and response are written.
        forward: the padded batch and its sequences to scores ``[B]``, float32.
        pad_id: what the batch is filled up with.
    """

    def __init__(self, text: PairText, forward: Forward, device: torch.device, pad_id: int) -> None:
        self.text = text
        self._forward, self._device, self._pad_id = forward, device, pad_id

    @torch.inference_mode()
    def score(self, items: Sequence[Encoded]) -> list[float]:
        """One score for each item, which must have a token at least."""
        scores = self._forward(self._padded(items), items)
        return [float(score) for score in scores.cpu()]

    def _padded(self, items: Sequence[Encoded]) -> Batch:
        shape = (len(items), max(item.length for item in items))
        ids, mask, types = np.full(shape, self._pad_id), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, item in enumerate(items):
            ids[row, : item.length] = item.token_ids
            mask[row, : item.length] = 1
            types[row, : len(item.token_types)] = item.token_types
        arrays = {"input_ids": ids, "attention_mask": mask} | (
            {"token_type_ids": types} if items[0].token_types else {}
        )
        return {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}


def load_network(config: ModelReward) -> RewardNetwork:
    """The reward model that a recipe names, tried with two texts.
    Raises RewardError: not found, not readable, not a reward model, or one whose scores would be wrong here."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise RewardError("reward.device: is cuda, but there is none here; use reward.device=cpu")
    name = config.path
    settings = _settings(name, config.trust_remote_code)
    tokenizer = _tokenizer(config)
    head_file = _value_head(name)
    if head_file is None:
        _check_classifier(name, settings)
    _check_length(config, context_limit(settings.get_text_config()))
    text = PairText(tokenizer, config.template, config.tokenizer or name)
    model = _from_pretrained(config, "AutoModel" if head_file else "AutoModelForSequenceClassification")
    _check_length(config, _positions(model))
    _check_vocabulary(config, model, tokenizer)
    forward = _forward(config, model, head_file)
    pad_id = max(0, getattr(settings.get_text_config(), "pad_token_id", None) or 0)  # some say -1 for none
    network = RewardNetwork(text, forward, torch.device(config.device), pad_id)
    _try(network, model if head_file is None else None, config)
    return network


def _forward(config: ModelReward, model: Any, head_file: str | None) -> Forward:
    """How this model gets from a batch to scores."""
    if head_file is None and not isinstance(getattr(model, "score", None), torch.nn.Linear):
        return _whole(model)
    if config.template == "pair":
        raise RewardError(
            f"reward.template: is pair, but the reward model {config.path} reads one text; use chat, or plain"
        )
    settings = model.config.get_text_config()
    if head_file is None:
        head = copy.deepcopy(model.score).float()
        return _last_token(model.base_model, head.weight, head.bias, settings.pad_token_id)
    weight, bias = load_value_head(head_file, settings.hidden_size)
    return _last_token(model, weight.to(config.device), bias.to(config.device), None)


def _last_token(backbone: Any, weight: torch.Tensor, bias: torch.Tensor | None, skipped: int | None) -> Forward:
    """The head, in float32, at the last token of each sequence.

    ``skipped`` is the padding token that a classifier of Transformers looks for: it takes the last token that is
    another one, also where a text ends with that token (padding = end of sequence), and was trained so.
    """

    def forward(batch: Batch, items: Sequence[Encoded]) -> torch.Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        hidden = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        places = torch.tensor([_last_place(item.token_ids, skipped) for item in items], device=ids.device)
        last = hidden[torch.arange(len(items), device=ids.device), places].float()
        return torch.nn.functional.linear(last, weight, bias).squeeze(-1)

    return forward


def _last_place(token_ids: Sequence[int], skipped: int | None) -> int:
    place = len(token_ids) - 1
    while place > 0 and token_ids[place] == skipped:
        place -= 1
    return place


def _whole(model: Any) -> Forward:
    """For encoders, which make the score out of all tokens, by their own rule."""

    def forward(batch: Batch, items: Sequence[Encoded]) -> torch.Tensor:
        return torch.as_tensor(model(**batch).logits).float().reshape(len(items))

    return forward


def _try(network: RewardNetwork, model: Any | None, config: ModelReward) -> None:
    """Compare scores made in a batch with those that the model gives by itself, one text at a time.

    The rules for padding and for the token that is scored hold for the architectures that are known. Of one that goes
    other ways this finds out before it has scored anything.
    """
    items = [network.text.encode(*probe) for probe in _PROBES]
    items = [Encoded(i.token_ids[: config.max_length], i.token_types[: config.max_length]) for i in items]
    try:
        together = network.score(items)
        if model is None:
            alone = [network.score([item])[0] for item in items]
        else:
            own = RewardNetwork(network.text, _whole(model), torch.device(config.device), 0)
            alone = [own.score([item])[0] for item in items]
    except Exception as error:  # whatever the architecture's code raises
        raise RewardError(f"reward model {config.path}: cannot score: {type(error).__name__}: {error}") from None
    tolerance = 1e-3 if config.compute_dtype == "float32" else 0.1  # bfloat16 has 8 bits
    for mine, theirs in zip(together, alone, strict=True):
        if abs(mine - theirs) > tolerance * max(1.0, abs(theirs)):
            raise RewardError(
                f"reward model {config.path}: a text that the model alone gives {theirs:g} gets {mine:g} in a batch; "
                "this architecture cannot be scored in batches here"
            )


def _settings(name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **from_where(name))
    except (OSError, ValueError, KeyError) as error:
        raise RewardError(_explain("model", name, error)) from None
    if getattr(settings, "is_encoder_decoder", False):
        raise RewardError(f"reward model {name}: encoders with a decoder ({settings.model_type}) are not supported")
    return settings


def _tokenizer(config: ModelReward) -> Any:
    try:
        return load_tokenizer(config.tokenizer or config.path, config.trust_remote_code)
    except ModelError as error:
        raise RewardError(f"reward {error}".replace("model.tokenizer", "reward.tokenizer")) from None


def _value_head(name: str) -> str | None:
    """The file with the head, in a folder or on the hub; None: there is none."""
    from transformers.utils import cached_file

    if Path(name).is_dir():
        file = Path(name) / FILE
        return str(file) if file.is_file() else None
    try:
        found: str | None = cached_file(name, FILE)
        return found
    except OSError:
        return None


def _check_classifier(name: str, settings: Any) -> None:
    """Refuse what is no reward model before its weights are loaded."""
    written = list(getattr(settings, "architectures", None) or ())
    if written and all(architecture.endswith(("ForCausalLM", "LMHeadModel")) for architecture in written):
        raise RewardError(
            f"reward model {name}: is a language model ({written[0]}) without {FILE}, not a reward model; a sequence "
            "classifier with one output is one, or a causal model with a value head"
        )
    if settings.num_labels != 1:
        raise RewardError(f"reward model {name}: has {settings.num_labels} outputs, where a reward model has one")


def _positions(model: Any) -> int | None:
    """How many positions an encoder has where they start after that of the padding, as in RoBERTa; None: another."""
    table: Any = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return None if padding is None else int(table.num_embeddings - padding - 1)


def _check_length(config: ModelReward, limit: int | None) -> None:
    if limit is not None and config.max_length > limit:
        raise RewardError(
            f"reward.max_length: is {config.max_length}, but the reward model {config.path} takes at most {limit} "
            f"tokens; use reward.max_length={limit}"
        )


def _check_vocabulary(config: ModelReward, model: Any, tokenizer: Any) -> None:
    """On a GPU a token that the model does not know would end every computation of the process."""
    known, largest = model.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values())
    if largest >= known:
        raise RewardError(
            f"reward model {config.path}: the tokenizer {config.tokenizer or config.path} has token {largest}, but the "
            f"model knows only {known} tokens; name its own tokenizer in reward.tokenizer"
        )


def _from_pretrained(config: ModelReward, kind: str) -> Any:
    import transformers

    try:
        with _quiet():
            model, report = getattr(transformers, kind).from_pretrained(
                config.path,
                dtype=getattr(torch, config.compute_dtype),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                **from_where(config.path),
            )
    except Exception as error:  # a damaged weight file raises whatever its reader raises
        raise RewardError(_explain("model", config.path, error)) from None
    for key in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report.get(key) or ()))
        if key == "unexpected_keys":
            names = [name for name in names if not name.startswith(_HARMLESS)]
        if names:
            raise RewardError(
                f"reward model {config.path}: {len(names)} {key.removesuffix('_keys')} weights, such as {names[0]}; "
                "Transformers would make up or leave out weights, and the scores would mean nothing"
            )
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise RewardError(f"reward model {config.path}: the weights {name} hold NaN or infinity")
    return model.eval().requires_grad_(False).to(config.device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' own report and progress bar: what matters in it is raised here."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _explain(what: str, name: str, error: Exception) -> str:
    reason = first_line(error)
    local = Path(name).expanduser()
    if local.exists():
        return f"reward {what} {name}: exists but cannot be loaded: {reason}"
    if name.startswith((".", "/", "~")):
        return f"reward {what} {name}: no such folder"
    return f"reward {what} {name}: neither a local folder nor found on the hub: {reason}"
