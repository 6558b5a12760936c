"""New weights for a served model over HTTP: from a checkpoint in an allowed folder, or in buckets from a run.

Consumes what clients send, hands it to the :class:`~dapo.serve.door.Door` of a model.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, Query, Request
from safetensors import SafetensorError
from safetensors.torch import load_file

from dapo.errors import ModelError
from dapo.inference.found_model import find_model
from dapo.model.adapters import file_key
from dapo.model.loading import is_finite
from dapo.serve.door import Begin, Door, FromCheckpoint, Refused
from dapo.serve.model import ServedModel
from dapo.util.asynchronous import in_thread

_Update = Annotated[str, Query(max_length=100)]


def _tensors(root: Path | None, name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Those of a checkpoint by the names that the engine has for them; read from the disk when used.
    Raises Refused: there is none, a link leads out of the folder, or it is of another model."""
    if root is None:
        raise Refused(403, "checkpoints are not taken; start the server with --weights-dir FOLDER")
    root, found, wanted = root.resolve(), dict[str, torch.Tensor](), {file_key(name): name for name in shapes}
    try:
        folder = (root / name).resolve(strict=True)
        files = list(Path(find_model(str(folder)).path).glob("*.safetensors")) if folder.is_relative_to(root) else []
        for file in files:
            found |= {wanted.get(file_key(key), key): tensor for key, tensor in _read(file, root).items()}
    except (OSError, ValueError, RuntimeError, ModelError):
        files = []
    except SafetensorError as error:
        raise Refused(400, f"checkpoint {name}: cannot be read: {error}", "checkpoint") from None
    if not files:
        raise Refused(404, f"checkpoint {name[:200]!r}: there is no such one below --weights-dir", "checkpoint")
    if "lm_head.weight" not in shapes:  # it is the embedding
        found.pop("lm_head.weight", None)
    have = {key: tuple(tensor.shape) for key, tensor in found.items()}
    if other := sorted(key for key in {**have, **shapes} if have.get(key) != shapes.get(key)):
        text = f"checkpoint {name}: is of another model: {len(other)} parameters differ, such as {other[0]}"
        raise Refused(400, text, "checkpoint")
    if bad := sorted(key for key, one in found.items() if not (one.is_floating_point() and is_finite(one))):
        text = f"checkpoint {name}: {len(bad)} parameters, such as {bad[0]}, are no finite floating-point numbers"
        raise Refused(400, text, "checkpoint")
    return found


def _read(file: Path, root: Path) -> dict[str, torch.Tensor]:
    """Raises OSError: it is not an ordinary file (opening others may block), or a link leads out of ``root``."""
    file = file.resolve(strict=True)
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        if not (stat.S_ISREG(os.fstat(opened.fileno()).st_mode) and file.is_relative_to(root)):
            raise OSError
        return load_file(f"/dev/fd/{opened.fileno()}")


_WITH_TENSORS = ("/weights/bucket", "/weights/commit")
PATHS = ("/weights", "/weights/begin", *_WITH_TENSORS)


def router(loaded: Callable[[], ServedModel], token: str | None, folder: Path | None) -> APIRouter:
    """``loaded``: the model, once there is one."""

    def needs_token() -> None:
        if token is None:
            raise Refused(403, "weights: this server has no token, so it takes none; start it with --token-env NAME")

    def of(model: str | None) -> Door:
        """Raises Refused: there is no such model, others compute with its weights, or its engine has ended."""
        served = loaded()
        name = model or served.name
        door = served.door(name)
        if name == served.name and len(served.doors) > 1:
            raise Refused(409, f"the adapters served here are on the weights of {name}, which therefore stay", "model")
        if door.ended:
            raise Refused(503, door.ended)
        return door

    def by(update: str) -> Door:
        """Whose update it is; if nobody's, anyone refuses it."""
        doors = loaded().doors
        return next((door for door in doors.values() if door.knows(update)), doors[loaded().name])

    routes = APIRouter(prefix="/weights", dependencies=[Depends(needs_token)])

    @routes.get("")
    async def state(model: str | None = None) -> dict[str, Any]:
        """The version in use, why no request is served, if that is so, and the rank of the adapter, if it has one."""
        door = of(model)
        ranks = [shape[0] for name, shape in door.engines[0].shapes.items() if ".lora_A." in name]
        reason = door.refusal or (None if door.is_open else "an update is under way")
        return {"version": door.version, "reason": reason, "adapter_rank": max(ranks, default=0)}

    @routes.post("")
    async def load_checkpoint(asked: FromCheckpoint) -> dict[str, Any]:
        """Take the weights of a checkpoint."""
        door = of(asked.model)
        tensors = await in_thread(_tensors, folder, asked.checkpoint, door.engines[0].shapes)
        return {"version": await door.load(asked, tensors)}

    @routes.post("/begin")
    async def begin(begin: Begin) -> dict[str, Any]:
        """New weights are to come, in buckets. ``update`` names them to the other two."""
        return {"update": begin.update, "version": await of(begin.model).begin(begin)}

    @routes.put("/bucket")
    async def bucket(request: Request, update: _Update) -> dict[str, Any]:
        await by(update).put(update, request.body)
        return {}

    @routes.post("/commit")
    async def commit(request: Request, update: _Update) -> dict[str, Any]:
        return {"version": await by(update).commit(update, request.body)}

    return routes


def largest_body(served: ServedModel | None, path: str) -> int | None:
    """Bytes of all weights in float32, with their names, where some are sent; None: elsewhere."""
    if served is None or path not in _WITH_TENSORS:
        return None
    every = (door.engines[0].shapes.values() for door in served.doors.values())
    return max(sum(4 * math.prod(shape) + 1024 for shape in shapes) for shapes in every)
