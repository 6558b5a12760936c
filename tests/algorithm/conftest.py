"""The modules under test come in through a fixture: ``test_mutants`` runs the same tests on broken copies."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from algorithm_support import load_modules


@pytest.fixture(scope="session")
def algo() -> SimpleNamespace:
    """``algo.shaping``, ``algo.advantage``, ``algo.admission``, ``algo.objective`` and ``algo.kl``."""
    return load_modules("dapo.algorithm")
