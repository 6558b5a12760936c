"""A long file of lines, thinned out: pieces that are evenly spread over it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST = 4 * 2**20
"""Bytes that are read of a file, however long it is."""
PIECES = 512


@contextmanager
def thinned(path: Path, most: int = MOST, pieces: int = PIECES) -> Iterator[Path]:
    """The file itself, or, if it is longer than ``most`` bytes, one with whole lines of ``pieces`` pieces of it, the
    first and the last line among them, for as long as the block lasts."""
    size, piece = path.stat().st_size, most // pieces
    if size <= most:
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="dapo-", suffix=path.suffix) as found, path.open("rb") as file:
        for place in range(pieces):
            start = (size - piece) * place // (pieces - 1)
            file.seek(start)
            text = file.read(piece)
            found.write(text[text.find(b"\n") + 1 if start else 0 : text.rfind(b"\n") + 1])
        found.flush()
        yield Path(found.name)
