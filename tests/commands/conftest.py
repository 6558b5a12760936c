"""What modules of this folder share that make a folder of models and rows once, and work in it."""

from pathlib import Path

import pytest


@pytest.fixture
def in_shared(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's own ``shared`` folder is where its commands run: ``pytestmark = usefixtures("in_shared")``."""
    monkeypatch.chdir(shared)
