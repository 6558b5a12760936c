"""Shared by all tests: helpers importable by name, one thread per test process, a time limit for each test.

Without a CUDA device kernels are interpreted, and tests marked gpu are skipped. What was skipped is said at the end of
a session; ``support/skips.py`` says which skips fail it in CI.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "support"), str(HERE), str(HERE.parent)]  # helpers; test_imports; conformance
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, which share the cores with other tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun by a script in the background: tests interrupt things
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup: still without effect here, but not on what is started
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, whichever test of a process needs it first


MINUTES = {"nightly": 90, "gpu": 15, "shared": 10}
"""Time limits of tests with a marker; all others have that of pyproject.toml."""


def pytest_configure(config: pytest.Config) -> None:
    from skips import SkipReport

    config.pluginmanager.register(SkipReport(fails=os.environ.get("CI") in ("1", "true")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("vllm") and not importlib.util.find_spec("vllm"):
            item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))
        minutes = max((MINUTES[marker.name] for marker in item.iter_markers() if marker.name in MINUTES), default=None)
        if minutes and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(60 * minutes))
