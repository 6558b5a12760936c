"""The adapters in examples/ with a release of what they adapt: nightly, see `make trackers`."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_endpoint import played
from test_episode_runs import lines_of, steps_of, train

from episodes import call, consistent

ROOT = Path(__file__).parents[2]
VERIFIERS = ROOT / ".venv-verifiers" / "bin" / "python"

pytestmark = pytest.mark.nightly


def test_a_run_over_an_environment_behind_openenv(tmp_path, monkeypatch):
    pytest.importorskip("openenv", reason="needs openenv: make trackers")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "support" / "openenv_game.py"), str(port)])
    try:
        monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{port}")
        end = time.monotonic() + 120
        while server.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.2)
        changes = {
            "environment.name": f"{ROOT}/examples/openenv_server.py:OpenEnv",
            "environment.credit": "turn",
            "algorithm.filter_groups.metric": "score",
        }
        train(tmp_path, changes, rows=[{"prompt": "Go.", "reset": {"seed": seed}} for seed in range(6)])
    finally:
        server.terminate()
        server.wait()
    for metrics, step in zip(steps_of(tmp_path), (1, 2), strict=True):
        lines = lines_of(tmp_path, step)
        assert metrics["mismatch/max"] < 1e-4 and metrics["reward/errors"] == 0
        assert all(len(line["turns"]) == 3 and line["ended"] == "done" for line in lines)
        assert all(0 < line["reward"] == pytest.approx(sum(turn[3] for turn in line["turns"])) for line in lines)


@pytest.mark.skipif(not VERIFIERS.exists(), reason="needs verifiers in .venv-verifiers: make trackers")
def test_episodes_of_a_taskset_of_verifiers(tmp_path, monkeypatch):
    """Two, so that the second finds the process of the first."""
    monkeypatch.setenv("VERIFIERS_PYTHON", str(VERIFIERS))
    monkeypatch.setenv("VERIFIERS_ENV", '{"taskset": {"id": "verifiers_game"}}')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"), prepend=os.pathsep)
    command = [VERIFIERS, ROOT / "examples" / "verifiers_agent.py", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[1] == '{"prompt": "In 2 letters.", "task": 1}'
    answers = [call("words_count", text="abc"), "no"]
    changes = {"environment__workers": 1, "environment__tool_timeout_s": 300.0, "environment__timeout_s": 500.0}
    agent = "../../examples/verifiers_agent.py:play"
    results = played(agent, lambda context, turn: answers[turn], prompts=2, limit_s=500, **changes)
    for result, script, prompt in results:
        sample = consistent(result, script, prompt)
        assert sample.ended == "done" and [turn.stop for turn in sample.turns] == ["tool_calls", "stop"]
        assert "<tool_response>\n3\n" in sample.text
        assert result.reward.value == pytest.approx(1 / (1 + 2 / (prompt.meta["task"] + 1)))
