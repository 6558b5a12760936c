"""A number in an update was not finite: where it came up first, and the update kept on disk to be looked at.

Consumes: the mini-batch of a skipped update with its gradients. Produces: a :class:`Fault` that names sample, layer and
parameter, and a folder with the batch (safetensors) and a report (JSON). Costs one forward pass without gradient, and
only when something went wrong.
"""

from __future__ import annotations

import math
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.utils import get_total_norm

from dapo.model.loading import is_finite
from dapo.records import IntArray, TokenBatch
from dapo.training.micro_batch import MicroBatch, micro_batches, select_tokens
from dapo.training.objective_protocol import Objective, unit_of
from dapo.training.policy import Policy
from dapo.util.files import new_folder, write_json
from dapo.util.version import VERSION

MAX_FOLDERS = 10
"""Faults kept of a run: the first one, which is the telling one, and the newest."""
MAX_TOKENS = 1 << 20
"""Tokens of one dump, about 60 MB: whole samples, that at fault first."""
MAX_TEXTS = 64
"""Samples whose texts are in the report, that at fault first."""
MAX_CHARACTERS = 2000
"""Of each text; the token ids are in the batch, whole."""


@dataclass(frozen=True, slots=True)
class BadToken:
    """The first response token at which a number was not finite: ``token`` counts from 0 in response ``sequence``.

    ``what`` the number was, and the name of the objective's input that was not finite there, if it was one.
    """

    what: str
    sequence: int
    draw: int
    index: int
    token: int
    given: str | None = None

    def __str__(self) -> str:
        """For people: tokens are counted from 1."""
        place = f"the {self.what} of sample {self.index} of draw {self.draw}, response token {self.token + 1}"
        return place if self.given is None else f"{place}, whose {self.given} is not finite"


@dataclass(frozen=True, slots=True)
class Fault:
    """Where an update first met a number that is not finite. Names are the model's own; None: not there.

    Attributes:
        weight: first parameter that is itself not finite.
        layer: first module, in the order of computation, whose output was not finite.
        token: first token whose log-probability, loss or derivative of the loss was not finite.
        bad_samples: samples with such a token, of ``samples``.
        gradients: parameters with a gradient that is not finite, in the order of the backward pass.
        largest: parameter with the largest gradient, where all are finite and only their norm is not.
        layers: largest absolute output of each module; NaN or infinite if one of its numbers was.
    """

    weight: str | None
    layer: str | None
    token: BadToken | None
    bad_samples: int
    samples: int
    gradients: Sequence[str]
    parameters: int
    largest: str | None
    layers: Mapping[str, float]

    @property
    def cause(self) -> str:
        """What was found, in the order of computation."""
        found = []
        if self.weight is not None:
            found.append(f"the weights of {self.weight} are not finite themselves")
        if self.layer is not None:
            found.append(f"the first layer whose output is not finite is {self.layer}")
        if self.token is not None:
            found.append(f"first in {self.token} ({self.bad_samples} of {self.samples} samples)")
        if self.gradients:
            first, last = self.gradients[0], self.gradients[-1]
            span = f"first in the gradient of {first}" + (f", last in that of {last}" if last != first else "")
            found.append(f"{span} ({len(self.gradients)} of {self.parameters} parameters)")
        if self.largest is not None:
            found.append(f"gradients are finite but too large to be added up, the largest that of {self.largest}")
        return "; ".join(found) or "it did not come up again in a second forward pass"

    @property
    def advice(self) -> str:
        """What to try, by where it came up."""
        if self.weight is not None:
            return (
                "the model is damaged: if it came so, mend model.path; otherwise start again from the weights of an "
                "earlier checkpoint with a lower training.learning_rate"
            )
        if self.token is not None and self.token.given is not None:
            return f"what was handed to the loss is wrong: look at {self.token.given} of that sample in the dump"
        if self.layer is not None:
            return (
                "numbers overflow inside of the model: start again from the weights of the last checkpoint with a "
                "lower training.learning_rate, or with model.compute_dtype=float32 if it is bfloat16"
            )
        return "start again from the weights of the last checkpoint with a lower training.learning_rate"


def diagnose(
    policy: Policy, batch: TokenBatch, inputs: Any, objective: Objective, parameters: Mapping[str, torch.nn.Parameter]
) -> Fault:
    """Compute the mini-batch once more, without the model's gradient, and see where numbers stop being finite.

    Args:
        policy: with the weights that the update met.
        batch: R response tokens.
        parameters: those trained, by name, with the gradients of the update.
    """
    watch = _Watch()
    bad = torch.zeros(batch.num_response_tokens, dtype=torch.bool)
    first: BadToken | None = None
    whole_groups = unit_of(objective) == "pair"
    for part in micro_batches(batch, policy.tokens_per_micro_batch, policy.device, whole_groups):
        if part.empty:
            continue
        with torch.no_grad(), watch.over(policy.model):
            logprobs, entropy = policy.evaluate(part)
        cut = select_tokens(inputs, part.index)
        what, tokens = _bad_tokens(logprobs, entropy, part.batch, cut, objective)
        bad[part.index.cpu()[tokens]] = True
        if first is None and len(tokens):
            first = _first_token(what, int(tokens[0]), part, cut, batch)
    policy.held.end_passes()
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    not_finite = [name for name, gradient in reversed(gradients.items()) if not is_finite(gradient)]
    overflow = gradients and not not_finite and not get_total_norm(gradients.values()).isfinite()
    return Fault(
        weight=next((name for name, p in parameters.items() if not is_finite(p)), None),
        layer=watch.first,
        token=first,
        bad_samples=len(np.unique(batch.sample_ids[bad.numpy()])),
        samples=batch.num_samples,
        gradients=not_finite,
        parameters=len(parameters),
        largest=max(gradients, key=lambda name: float(gradients[name].abs().max())) if overflow else None,
        layers=watch.largest,
    )


def _bad_tokens(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: TokenBatch, inputs: Any, objective: Objective
) -> tuple[str, torch.Tensor]:
    """What is not finite, and at which loss tokens of a micro-batch (on the host): the first of the three found."""
    in_loss = inputs.weights != 0
    wrong = in_loss & ~logprobs.isfinite()
    if wrong.any():
        return "log-probability", wrong.nonzero()[:, 0].cpu()
    if _loss_is_finite(logprobs, entropy, inputs, objective):
        slopes = _slopes(logprobs, entropy, inputs, objective)
        return "derivative of the loss", (~slopes.isfinite()).nonzero()[:, 0].cpu()
    # a loss is a sum over its units, so it can be asked for each sample or pair; of one found each token, or all of it
    unit = unit_of(objective)
    ids = torch.from_numpy(batch.group_ids if unit == "pair" else batch.sample_ids)
    parts = [(ids == one).nonzero()[:, 0].to(logprobs.device) for one in range(batch.num_samples)]
    found = [
        token
        for part in parts
        if not _loss_is_finite(logprobs[part], entropy[part], select_tokens(inputs, part), objective)
        for token in (part[i : i + 1] for i in range(len(part)))
        if unit != "token"
        or not _loss_is_finite(logprobs[token], entropy[token], select_tokens(inputs, token), objective)
    ]
    return "loss", torch.cat(found).cpu() if found else torch.empty(0, dtype=torch.long)


def _loss_is_finite(logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any, objective: Objective) -> bool:
    with torch.no_grad():
        return math.isfinite(float(objective(logprobs, entropy, inputs)[0]))


def _slopes(logprobs: torch.Tensor, entropy: torch.Tensor, inputs: Any, objective: Objective) -> torch.Tensor:
    """``[R]``: derivative of the loss by log-probability plus that by entropy."""
    leaves = [logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()]
    loss, _ = objective(leaves[0], leaves[1], inputs)
    if not loss.requires_grad:
        return torch.zeros_like(logprobs)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return sum((slope for slope in found if slope is not None), torch.zeros_like(logprobs))


def _first_token(what: str, place: int, part: MicroBatch, inputs: Any, whole: TokenBatch) -> BadToken:
    at = int(part.index[place])
    sequence = int(whole.sample_ids[at])
    draw, index = int(whole.draws[sequence]), int(whole.indices[sequence])
    token = at - int(whole.response_lengths[:sequence].sum())
    given = next((name for name, values in _tensors(inputs).items() if not is_finite(values[place])), None)
    return BadToken(what, sequence, draw, index, token, given)


@dataclass(slots=True)
class _Watch:
    """Sees the output of every module: the first one that is not finite, and the largest number of each."""

    first: str | None = None
    largest: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def over(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside, forward passes of ``model`` are watched. A module ends after those inside it, so these come first."""
        handles = [
            module.register_forward_hook(lambda _module, _given, out, name=name: self._see(name, out))
            for name, module in model.named_modules()
            if name
        ]
        try:
            with torch.compiler.set_stance("force_eager"):  # compiled layers have no modules to watch
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, name: str, output: Any) -> None:
        tensors = [t for t in _leaves(output) if t.is_floating_point() and t.numel()]
        largest = [float(t.detach().abs().max()) for t in tensors]  # max() of torch lets NaN through, Python's not
        bad = next((value for value in largest if not math.isfinite(value)), None)
        if bad is not None and self.first is None:
            self.first = name
        before = self.largest.get(name, 0.0)
        if math.isfinite(before):
            self.largest[name] = bad if bad is not None else max([before, *largest])


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (leaf for item in value.values() for leaf in _leaves(item))
    elif isinstance(value, list | tuple):
        yield from (leaf for item in value for leaf in _leaves(item))


def _tensors(record: Any) -> dict[str, torch.Tensor]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


# --- on disk ------------------------------------------------------------------------------------------------------


class FaultFolder:
    """RUN/faults: a folder for each skipped update, such as ``step-00012-update-3``, and not more than a few.

    Each holds ``batch.safetensors`` (the arrays of the batch under ``batch/``, those of the objective's inputs
    under ``inputs/``) and ``report.json``.
    """

    def __init__(self, root: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """``root``: made when it is needed. ``decode``: token ids to text; without it the report has ids only."""
        self.root = root
        self._decode = decode

    def write(self, name: str, fault: Fault, batch: TokenBatch, inputs: Any, facts: Mapping[str, Any]) -> str:
        """Keep an update, in the place of one of the same name. Returns where, or why not: a full disk ends no run."""
        first = fault.token.sequence if fault.token else 0
        try:
            shutil.rmtree(self.root / name, ignore_errors=True)  # of the same update, before the run was resumed
            self._make_room()
            with new_folder(self.root / name) as staging:
                chosen = _bounded(batch, first)
                part = batch.select(chosen)
                tensors = {f"batch/{key}": torch.from_numpy(value) for key, value in _arrays(part).items()}
                index = torch.from_numpy(batch.response_index(chosen)).to(inputs.weights.device)
                cut = _tensors(select_tokens(inputs, index))
                tensors |= {f"inputs/{key}": value.detach().cpu().contiguous() for key, value in cut.items()}
                save_file(tensors, staging / "batch.safetensors")
                report = {
                    "cause": fault.cause,
                    "advice": fault.advice,
                    **{key: _number(value) for key, value in facts.items()},
                    "layers": {key: _number(value) for key, value in fault.layers.items()},
                    "samples_in_batch": batch.num_samples,
                    "samples_kept": len(chosen),
                    "samples": list(self._samples(part)),
                    "versions": {
                        "dapo": VERSION,
                        "torch": torch.__version__,
                        "transformers": transformers.__version__,
                        "python": platform.python_version(),
                        "platform": platform.platform(),
                    },
                }
                write_json(staging / "report.json", report)
        except (OSError, SafetensorError) as error:
            return f"it could not be written to {self.root.name}/{name}: {getattr(error, 'strerror', None) or error}"
        return f"the batch and a report are in {self.root.name}/{name}"

    def _make_room(self) -> None:
        if not self.root.is_dir():
            return
        kept = sorted(self.root.glob("step-*"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
        for path in kept[1 : max(1, len(kept) - MAX_FOLDERS + 2)]:
            shutil.rmtree(path, ignore_errors=True)

    def _samples(self, batch: TokenBatch) -> Iterator[dict[str, Any]]:
        ids = batch.token_ids.tolist()
        starts = np.cumsum(batch.lengths) - batch.lengths
        for i in range(min(batch.num_samples, MAX_TEXTS)):
            prompt, end = starts[i] + batch.prompt_lengths[i], starts[i] + batch.lengths[i]
            sample = {
                "draw": batch.draws[i],
                "index": batch.indices[i],
                "prompt_tokens": batch.prompt_lengths[i],
                "response_tokens": end - prompt,
            }
            if self._decode is not None:
                sample["prompt"] = self._decode(ids[starts[i] : prompt])[:MAX_CHARACTERS]
                sample["response"] = self._decode(ids[prompt:end])[:MAX_CHARACTERS]
            yield sample


def read_fault(path: Path | str) -> tuple[TokenBatch, dict[str, torch.Tensor]]:
    """The batch of a skipped update, and the objective's inputs by name, from its ``batch.safetensors``."""
    found = load_file(path)
    batch = {key[6:]: tensor.numpy() for key, tensor in found.items() if key.startswith("batch/")}
    own = {f.name: batch.pop(f.name) for f in fields(TokenBatch) if f.name in batch}
    inputs = {key[7:]: tensor for key, tensor in found.items() if key.startswith("inputs/")}
    return TokenBatch(**own, columns=batch), inputs


def norms(
    parameters: Mapping[str, torch.nn.Parameter], whole: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Euclidean norm of each parameter and of its gradient, for the report. ``whole``: all rows of one of them."""

    def norm(name: str, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else _number(float(whole(name, tensor.detach()).norm()))

    return {name: {"weight": norm(name, p), "gradient": norm(name, p.grad)} for name, p in parameters.items()}


def _bounded(batch: TokenBatch, first: int) -> IntArray:
    """Whole samples within :data:`MAX_TOKENS`, ``first`` before all others."""
    chosen: list[int] = []
    tokens = 0
    for i in [first, *(i for i in range(batch.num_samples) if i != first)]:
        tokens += int(batch.lengths[i])
        if chosen and tokens > MAX_TOKENS:
            break
        chosen.append(i)
    return np.asarray(chosen, dtype=np.int64)


def _arrays(batch: TokenBatch) -> dict[str, Any]:
    """Of the batch and its columns, which have names of their own, by name."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {name: value for name, value in values.items() if name != "columns"} | dict(batch.columns)


def _number(value: Any) -> Any:
    """JSON knows no NaN and no infinity: as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
