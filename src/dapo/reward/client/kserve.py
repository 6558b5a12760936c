"""Client of models behind the Open Inference Protocol (KServe V2), as Triton Inference Server and MLServer speak it.

Tensors of text are sent, one row a response, and tensors of rewards come back, as JSON: binary data is an extension
that MLServer, for one, lacks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

from dapo.config import KServeReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.client.mapping import fill, to_json, to_verdict, unfillable
from dapo.reward.client.scorer import LARGEST_REPLY, Call, RemoteScorer
from dapo.reward.contract import Doubt
from dapo.util.http.connections import whole
from dapo.util.http.faults import BadReply, Fault, from_json
from dapo.util.http.mapping import as_text


class KServeScorer(RemoteScorer):
    def __init__(self, config: KServeReward) -> None:
        super().__init__(config)
        self._name += f", model {config.model!r}"
        self._model = config
        self._outputs = [config.output, *([config.correct] if config.correct else [])]
        self._server = f"{config.url.rstrip('/')}/v2"
        version = f"/versions/{quote(config.version, safe='')}" if config.version else ""
        self._path = f"{self._server}/models/{quote(config.model, safe='')}{version}"

    async def _check_ready(self) -> None:
        await self._require_ready(f"{self._server}/health/ready", "server")
        async with self._send("GET", self._path) as reply:
            described = from_json(await whole(await self._checked(reply), LARGEST_REPLY))
        await self._require_ready(f"{self._path}/ready", "model")
        self._check_tensors(described)

    async def _require_ready(self, url: str, what: str) -> None:
        async with self._send("GET", url) as reply:
            if reply.status == 400:  # so Triton says it
                raise Fault(f"the {what} is not ready", alive=True)
            await self._checked(reply)

    def _check_tensors(self, described: Any) -> None:
        """Raises RewardError: the model describes other tensors than the recipe names."""
        for kind, wanted in (("inputs", [*self._model.inputs]), ("outputs", self._outputs)):
            found = {name: tensor.get("datatype") for name, tensor in _by_name(described, kind).items()}
            for name in wanted if found else ():
                if name not in found:
                    text = f"it has no {kind[:-1]} {name!r}; its {kind} are {', '.join(map(repr, found))}"
                    raise RewardError(f"{self._name}: {text}")
                if kind == "inputs" and found[name] != "BYTES":
                    raise RewardError(f"{self._name}: its input {name!r} is {found[name]}; text needs BYTES")

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        return unfillable(self._model.inputs, prompts)

    async def _ask(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Reward | BadReply]]:
        inputs = [
            {
                "name": name,
                "datatype": "BYTES",
                "shape": [len(calls), 1],
                "data": [as_text(fill(template, [call])) for call in calls],
            }
            for name, template in self._model.inputs.items()
        ]
        body = to_json({"inputs": inputs, "outputs": [{"name": name} for name in self._outputs]})
        async with self._send("POST", f"{self._path}/infer", body) as reply:
            found = _by_name(from_json(await whole(await self._checked(reply), LARGEST_REPLY)), "outputs")
        columns = [_column(found, name, len(calls)) for name in self._outputs]
        for place, numbers in enumerate(zip(*columns, strict=True)):
            yield place, self._verdict(numbers, place)

    def _verdict(self, numbers: Sequence[Any], place: int) -> Reward | BadReply:
        if self._model.correct is None:
            return to_verdict(numbers[0], place, "", self._name)
        value, correct = numbers
        if correct not in (0, 1):  # True and False are
            return BadReply(f"result {place + 1}: right or wrong ({self._model.correct}) must be 0 or 1, got {correct}")
        return to_verdict({"value": float(value), "correct": bool(correct)}, place, "", self._name)


def _by_name(reply: Any, key: str) -> dict[str, dict[str, Any]]:
    """The tensors of a reply. Raises BadReply: it has none."""
    try:
        return {str(tensor["name"]): dict(tensor) for tensor in reply.get(key) or ()}
    except (AttributeError, TypeError, ValueError, KeyError):
        raise BadReply(f"the reply cannot be read: {key} is no list of tensors") from None


def _column(found: dict[str, dict[str, Any]], name: str, count: int) -> list[float]:
    """One number for each response, from a tensor of shape ``[responses]`` or ``[responses, 1]``.
    Raises BadReply: it has another shape, or holds no numbers."""
    if name not in found:
        raise BadReply(f"the reply has no output {name!r}")
    data = found[name].get("data")
    rows = data if isinstance(data, list) else []
    values = [value for row in rows for value in (row if isinstance(row, list) else [row])]
    if len(values) != count:
        raise BadReply(f"output {name!r} has {len(values)} numbers for {count} responses")
    odd = [value for value in values if not isinstance(value, int | float)]
    if odd:
        raise BadReply(f"output {name!r} holds {odd[0]!r}, which is no number")
    return values
