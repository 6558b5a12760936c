"""Client of models behind the Open Inference Protocol (KServe V2), as Triton Inference Server and MLServer speak it.

Tensors of text are sent, one row a response, and tensors of rewards come back. They travel as JSON: binary data is an
extension that MLServer, for one, lacks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import tritonclient.http.aio as triton  # type: ignore[import-untyped]
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

from dapo.config import KServeReward
from dapo.errors import RewardError
from dapo.records import Prompt, Reward
from dapo.reward.client.mapping import fill, to_verdict, unfillable
from dapo.reward.client.scorer import Call, RemoteScorer
from dapo.reward.contract import Doubt
from dapo.util.http.connections import connection_fault
from dapo.util.http.faults import BadReply, Fault, Refusal
from dapo.util.http.mapping import as_text

_LATER = ("408", "429")
_BUSY = ("502", "503", "504")
_REFUSED = ("413", "422")


class KServeScorer(RemoteScorer):
    def __init__(self, config: KServeReward) -> None:
        super().__init__(config)
        self._model = config
        self._outputs = [config.output, *([config.correct] if config.correct else [])]
        self._connections: Any = None
        # tritonclient does not send these, and cannot read a compressed error
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._token is not None:
            self._headers["Authorization"] = f"Bearer {self._token}"

    @property
    def _client(self) -> Any:
        """Made when first needed, as it must be made on the event loop."""
        if self._connections is None:
            scheme, _, rest = self._model.url.rstrip("/").partition("://")
            self._connections = triton.InferenceServerClient(
                rest, ssl=scheme == "https", conn_limit=self._most_connections, conn_timeout=self._model.timeout_s
            )
        return self._connections

    async def _close_connections(self) -> None:
        if self._connections is not None:
            await self._connections.close()

    async def _check_ready(self) -> None:
        model, headers = self._model, self._headers
        try:
            if not await self._client.is_server_ready(headers=dict(headers)):
                raise Fault("the server is not ready", alive=True)
            described = await self._client.get_model_metadata(model.model, model.version, headers=dict(headers))
            if not await self._client.is_model_ready(model.model, model.version, headers=dict(headers)):
                raise Fault(f"the model {model.model!r} is not ready", alive=True)
        except InferenceServerException as error:
            raise self._problem(error) from None
        except (aiohttp.ClientError, OSError) as error:
            raise connection_fault(error) from None
        self._check_tensors(described)

    def _check_tensors(self, described: Any) -> None:
        """Raises RewardError: the model describes other tensors than the recipe names."""
        model = self._model
        for kind, wanted in (("inputs", [*model.inputs]), ("outputs", self._outputs)):
            found = {str(tensor.get("name")): str(tensor.get("datatype")) for tensor in described.get(kind) or ()}
            for name in wanted if found else ():
                if name not in found:
                    text = f"the model {model.model!r} has no {kind[:-1]} {name!r}; its {kind} are "
                    raise RewardError(f"{self._name}: {text}{', '.join(map(repr, found))}")
                if kind == "inputs" and found[name] != "BYTES":
                    text = f"the input {name!r} of the model {model.model!r} is {found[name]}; text needs BYTES"
                    raise RewardError(f"{self._name}: {text}")

    async def examine(self, prompts: Sequence[Prompt]) -> Sequence[Doubt]:
        return unfillable(self._model.inputs, prompts)

    async def _ask(self, calls: Sequence[Call]) -> AsyncIterator[tuple[int, Reward | BadReply]]:
        model = self._model
        inputs = [
            _text_tensor(name, [as_text(fill(template, [call])) for call in calls])
            for name, template in model.inputs.items()
        ]
        names = self._outputs
        outputs = [triton.InferRequestedOutput(name, binary_data=False) for name in names]
        try:
            reply = await self._client.infer(
                model.model, inputs, model.version, outputs=outputs, headers=dict(self._headers)
            )
            columns = [_column(reply, name, len(calls)) for name in names]
        except InferenceServerException as error:
            raise self._problem(error) from None
        except TimeoutError:
            raise Fault(f"no answer within {model.timeout_s:g} s", smaller=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise connection_fault(error) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadReply(f"the reply cannot be read: {type(error).__name__}: {error}") from None
        for place in range(len(calls)):
            yield place, self._verdict([column[place] for column in columns], place)

    def _verdict(self, numbers: Sequence[Any], place: int) -> Reward | BadReply:
        if self._model.correct is None:
            return to_verdict(numbers[0], place, "", self._name)
        value, correct = numbers
        if correct not in (0, 1):  # True and False are
            return BadReply(f"result {place + 1}: right or wrong ({self._model.correct}) must be 0 or 1, got {correct}")
        return to_verdict({"value": float(value), "correct": bool(correct)}, place, "", self._name)

    def _problem(self, error: InferenceServerException) -> Exception:
        status = str(error.status() or "")
        # another body than the protocol's error is in the details: often a traceback, whose last line is the error
        body = str(error.debug_details() or "").strip()
        cause = f"{status or 'error'}: {body.splitlines()[-1] if body else error.message()}"
        if not status:
            return BadReply(cause)
        if status in (*_LATER, *_BUSY):
            return Fault(cause, alive=status in _BUSY)
        if status.startswith("5"):
            return Fault(cause, smaller=True)
        if status in _REFUSED:
            return Refusal(cause)
        advice = "; is the model's name right?" if status in ("400", "404") else ""
        if status in ("401", "403"):
            advice = "; reward.token_env names the environment variable with the token of the server"
        return RewardError(f"{self._name}, model {self._model.model!r}: {cause}{advice}")


def _text_tensor(name: str, texts: Sequence[str]) -> Any:
    """BYTES of shape ``[responses, 1]``. Lone surrogates, which UTF-8 cannot hold, become question marks."""
    tensor = triton.InferInput(name, [len(texts), 1], "BYTES")
    encoded = [text.encode("utf-8", "replace") for text in texts]
    tensor.set_data_from_numpy(np.array(encoded, dtype=np.object_).reshape(-1, 1), binary_data=False)
    return tensor


def _column(reply: Any, name: str, count: int) -> list[Any]:
    """One number for each response, from a tensor of shape ``[responses]`` or ``[responses, 1]``.
    Raises BadReply: it has another shape, or holds no numbers."""
    tensor = reply.as_numpy(name)
    if tensor is None:
        raise BadReply(f"the reply has no output {name!r}")
    if tensor.shape not in ((count,), (count, 1)):
        raise BadReply(f"output {name!r} has shape {list(tensor.shape)} for {count} responses")
    if tensor.dtype.kind not in "biuf":
        raise BadReply(f"output {name!r} holds {tensor.dtype}, not numbers")
    values = list(tensor.reshape(-1).tolist())
    if tensor.dtype.kind == "b":  # numpy has made a True of any text
        for value in reply.get_output(name).get("data") or ():
            if value not in (0, 1):
                raise BadReply(f"output {name!r} is BOOL and holds {value!r}")
    return values
