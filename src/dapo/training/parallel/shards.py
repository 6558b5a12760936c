"""Files of a sharded model: whole tensors in the layouts of one process, each written by one of the ranks.

A tensor is gathered, kept by the rank that has written least so far, and let go of by the others. So no device and no
process ever holds a whole model, any number of ranks and a single process read what any other wrote, and a folder is
there whole or not at all, once every rank has written its files. All ranks see the same file system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from dapo.training.checkpoint import SHARD_BYTES
from dapo.training.parallel.ranks import Ranks
from dapo.util.files import flush_to_disk, new_folder


@contextmanager
def folder_of_all(ranks: Ranks, folder: Path) -> Iterator[Path]:
    """A temporary folder of all ranks that becomes ``folder`` once the block ends without an error on every one.
    Raises FileExistsError: it exists and is not empty."""
    with ExitStack() as stack:
        mine = ranks.together(lambda: stack.enter_context(new_folder(folder)), alone=(0,))
        yield ranks.gather(mine)[0] or folder
        ranks.together(stack.close)


def write_shards(
    ranks: Ranks, folder: Path, file: str, tensors: Mapping[str, Callable[[], torch.Tensor]]
) -> dict[str, str]:
    """Key -> name of its file, as an index has it. ``tensors``: each is made by all ranks together."""
    written = [0] * ranks.size
    kept: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    failure: Exception | None = None

    def put_down() -> None:
        name = file.replace(".", f"-{ranks.rank + 1:05d}-{len(set(places.values())) + 1:05d}.", 1)
        places.update(dict.fromkeys(kept, name))
        save_file(dict(kept), folder / name, metadata={"format": "pt"})
        flush_to_disk(folder / name)
        kept.clear()

    for key, make in tensors.items():
        whole = make()
        owner = written.index(min(written))
        written[owner] += whole.numel()
        if owner != ranks.rank or failure is not None:
            continue
        try:  # the others go on to the next tensor, so this one does too
            kept[key] = whole.to("cpu", copy=True).contiguous()
            if sum(t.numel() * t.element_size() for t in kept.values()) > SHARD_BYTES:
                put_down()
        except Exception as error:
            failure = error

    def finish() -> None:
        if failure is not None:
            raise failure
        if kept:
            put_down()

    ranks.together(finish)
    return {key: name for part in ranks.gather(places) for key, name in part.items()}
