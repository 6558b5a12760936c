"""A server over a random model that writes bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from served import PINNED, Served, save_byte_model, served


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Served]:
    with served(folder, *PINNED) as found:
        yield found
