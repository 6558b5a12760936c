"""The network of a reward model: loading, refusing what would score wrongly, and scores for a batch.

Sequences are padded on the right. The token that a score is read from is found in the sequence itself, so that it does
not depend on padding and batch.
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
from dapo.model.adapters import Adapter, find_adapter, put_on
from dapo.model.hub import from_where
from dapo.model.loading import context_limit, is_finite, load_tokenizer
from dapo.reward.model.text import Encoded, PairText

_HARMLESS = ("lm_head.", "cls.")
"""Weights of language model heads, which reward models do not use."""
_PROBES = (("2+2=", "4"), ("Name three primes.", "2, 3 and 5 are the three smallest ones; 1 is none."))
"""Texts of two lengths that a network is tested with."""

Batch = dict[str, torch.Tensor]
Forward = Callable[[Batch, Sequence[Encoded]], torch.Tensor]


class RewardNetwork:
    """A network and its tokenizer. One thread may tokenize while another one scores. ``forward``: from the padded batch
    and its sequences to scores ``[B]``, float32."""

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
        arrays = {"input_ids": ids, "attention_mask": mask}
        if items[0].token_types:
            arrays["token_type_ids"] = types
        return {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}


def load_network(config: ModelReward) -> RewardNetwork:
    """The reward model of a recipe, tested with two texts.
    Raises RewardError: not found, not readable, not a reward model, or one whose scores would be wrong here."""
    if config.device == "auto":
        config = config.model_copy(update={"device": "cuda" if torch.cuda.is_available() else "cpu"})
    if config.device == "cuda" and not torch.cuda.is_available():
        raise RewardError("reward.device: is cuda, but there is none here; use reward.device=cpu")
    name, adapter = config.path, _adapter(config.path)
    settings = _settings(name, adapter, config.trust_remote_code)
    if hasattr(settings, "quantization_config"):  # it computes in the type that it was made in
        config = config.model_copy(update={"compute_dtype": str(settings.dtype).removeprefix("torch.")})
    tokenizer = _tokenizer(config)
    _check_classifier(name, settings)
    _check_length(config, context_limit(settings.get_text_config()))
    text = PairText(tokenizer, config.template, config.tokenizer or name)
    model = _from_pretrained(config, settings, adapter)
    _check_length(config, _positions(model))
    _check_vocabulary(config, model, tokenizer)
    forward = _forward(config, model)
    pad_id = max(0, getattr(settings.get_text_config(), "pad_token_id", None) or 0)  # some say -1 for none
    network = RewardNetwork(text, forward, torch.device(config.device), pad_id)
    _try(network, model, config)
    return network


def _forward(config: ModelReward, model: Any) -> Forward:
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        return _whole(model)
    if config.template == "pair":
        text = f"is pair, but the reward model {config.path} reads one text; use chat, or plain"
        raise RewardError(f"reward.template: {text}")
    head = copy.deepcopy(model.score).float()
    return _last_token(model.base_model, head.weight, head.bias, model.config.get_text_config().pad_token_id)


def _last_token(backbone: Any, weight: torch.Tensor, bias: torch.Tensor | None, skipped: int | None) -> Forward:
    """The head, in float32, at the last token of each sequence that is not ``skipped``: classifiers of Transformers are
    trained to skip the padding token, also where a text ends with it (padding = end of sequence)."""

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
    """For encoders, which compute the score from all tokens."""

    def forward(batch: Batch, items: Sequence[Encoded]) -> torch.Tensor:
        return torch.as_tensor(model(**batch).logits).float().reshape(len(items))

    return forward


def _try(network: RewardNetwork, model: Any, config: ModelReward) -> None:
    """Compare scores in a batch with those of the model itself, one text at a time: padding and the scored token may be
    other ones in an architecture that is not known here."""
    items = [network.text.encode(*probe) for probe in _PROBES]
    items = [Encoded(i.token_ids[: config.max_length], i.token_types[: config.max_length]) for i in items]
    try:
        together = network.score(items)
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


def _adapter(name: str) -> Adapter | None:
    try:
        return find_adapter(name)
    except ModelError as error:
        raise RewardError(f"reward model {error}") from None


def _settings(name: str, adapter: Adapter | None, trust_remote_code: bool) -> Any:
    """Of an adapter those of its base, as a classifier without padding token: the last token is the one scored."""
    from transformers import AutoConfig

    where = adapter.base if adapter else name
    try:
        settings = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **from_where(where))
        if adapter is not None:
            settings.num_labels, settings.pad_token_id, settings.architectures = 1, None, None
    except (OSError, ValueError, KeyError) as error:
        raise RewardError(_explain(name, error)) from None
    if getattr(settings, "is_encoder_decoder", False):
        raise RewardError(f"reward model {name}: encoders with a decoder ({settings.model_type}) are not supported")
    return settings


def _tokenizer(config: ModelReward) -> Any:
    try:
        return load_tokenizer(config.tokenizer or config.path, config.trust_remote_code)
    except ModelError as error:
        raise RewardError(f"reward {error}".replace("model.tokenizer", "reward.tokenizer")) from None


def _check_classifier(name: str, settings: Any) -> None:
    written = list(getattr(settings, "architectures", None) or ())
    if written and all(architecture.endswith(("ForCausalLM", "LMHeadModel")) for architecture in written):
        raise RewardError(
            f"reward model {name}: is a language model ({written[0]}), not a reward model; a sequence classifier with "
            "one output is one"
        )
    if settings.num_labels != 1:
        raise RewardError(f"reward model {name}: has {settings.num_labels} outputs, where a reward model has one")


def _positions(model: Any) -> int | None:
    """Positions of an encoder that counts them from behind the padding's, as RoBERTa does; None: it does not."""
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
    """On a GPU a token that the model does not know would break every computation of the process."""
    known, largest = model.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values())
    if largest >= known:
        raise RewardError(
            f"reward model {config.path}: the tokenizer {config.tokenizer or config.path} has token {largest}, but the "
            f"model knows only {known} tokens; name its own tokenizer in reward.tokenizer"
        )


def _from_pretrained(config: ModelReward, settings: Any, adapter: Adapter | None) -> Any:
    import transformers

    where = adapter.base if adapter else config.path
    try:
        with _quiet():
            model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                where,
                config=settings,
                dtype=getattr(torch, config.compute_dtype),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                **from_where(where),
            )
            if adapter is not None:
                model = put_on(model, adapter)
    except ModelError as error:
        raise RewardError(f"reward model {error}") from None
    except Exception as error:  # a damaged weight file raises whatever its reader raises
        raise RewardError(_explain(where, error)) from None
    for key in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report.get(key) or ()))
        if key == "unexpected_keys":
            names = [name for name in names if not name.startswith(_HARMLESS)]
        elif adapter is not None:
            names = [name for name in names if not name.startswith("score.")]  # which the adapter has
        if names:
            raise RewardError(
                f"reward model {config.path}: {len(names)} {key.removesuffix('_keys')} weights, such as {names[0]}; "
                "Transformers would make up or leave out weights, and the scores would mean nothing"
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data) is torch.Tensor and not is_finite(parameter):  # else one of torchao's
            raise RewardError(f"reward model {config.path}: the weights {name} hold NaN or infinity")
    return model.eval().requires_grad_(False).to(config.device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' own report and progress bar: errors in it are raised here."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _explain(name: str, error: Exception) -> str:
    if Path(name).expanduser().exists():
        return f"reward model {name}: exists but cannot be loaded: {first_line(error)}"
    if name.startswith((".", "/", "~")):
        return f"reward model {name}: no such folder"
    return f"reward model {name}: neither a local folder nor found on the hub: {first_line(error)}"
