"""One seed per sample, so that a response does not depend on its neighbours in the batch."""

from __future__ import annotations

import hashlib
import struct


def sample_seed(run_seed: int, row: int, draw: int, index: int) -> int:
    """The 64-bit seed of sample ``index`` of prompt ``row`` in draw ``draw`` of a run.

    A hash and not a sum, so that neighbouring runs, rows, draws and samples share no stream.
    """
    digest = hashlib.blake2b(struct.pack("<4q", run_seed, row, draw, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def turn_seed(run_seed: int, row: int, draw: int, index: int, turn: int) -> int:
    """Of one turn of an episode; the first has that of a single response."""
    return sample_seed(run_seed, row, draw, index + (turn << 32))
