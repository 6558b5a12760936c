"""`dapo serve`: what it says when it cannot."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from command_cases import dapo


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--token-env"),
        (["--token-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["--adapter", "poet"], "expected NAME=FOLDER"),
        (["--adapter", "a=x", "--adapter", "a=y"], "another adapter named a"),
        (["--port", "0", "--adapter", "tiny=x"], "--name"),
        (["--port", "0", "--set", "data.max_prompt_lenght=3"], "max_prompt_length"),
        (["--port", "0", "--adapter", "a=gone"], "adapter_config.json"),
    ],
)
def test_what_is_wrong_is_named_at_once(folder: Path, words: list[str], said: str) -> None:
    found = dapo("serve", folder, *words)
    assert found.exit_code in (1, 2) and said in found.output and "Traceback" not in found.output


def test_a_port_that_is_taken_and_a_model_that_is_not_there(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = dapo("serve", folder, "--port", port)
    assert found.exit_code == 2 and f"127.0.0.1, port {port}" in found.output
    found = dapo("serve", "./gone", "--port", 0)
    assert found.exit_code in (1, 2) and "no such folder" in found.output
