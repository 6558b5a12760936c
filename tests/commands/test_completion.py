"""Shell completion, in process: the answers that the shell gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapo.commands import app


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def complete(words: str, shell: str = "bash") -> list[str]:
    """What the shell offers after ``words``, the last of which (perhaps empty) is being typed."""
    parts = words.split(" ")
    environment = {"_DAPO_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(len(parts) - 1)}
    environment |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_WORD_TO_COMPLETE": parts[-1]}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = CliRunner().invoke(app, [], env=environment, prog_name="dapo")
    assert result.exit_code == 0, result.output
    return [line for line in str(result.stdout).splitlines() if line]


def test_keys_of_the_config() -> None:
    found = complete("dapo train r.yaml training.")
    assert "training.steps=" in found and "training.learning_rate=" in found
    assert all(word.startswith("training.") for word in found)


def test_the_last_key_left_comes_with_its_values() -> None:
    assert complete("dapo train r.yaml algorithm.kl.mo") == [
        *("algorithm.kl.mode=", "algorithm.kl.mode=off", "algorithm.kl.mode=measure"),
        *("algorithm.kl.mode=loss", "algorithm.kl.mode=reward"),
    ]
    assert complete("dapo train r.yaml training.steps") == ["training.steps=", "training.steps=100"]
    assert complete("dapo train r.yaml seed=1 data.shuffle=f") == ["data.shuffle=false"]
    assert complete("dapo train r.yaml zzz") == []


def test_bash_takes_words_apart_at_the_equals_sign() -> None:
    assert complete("dapo train r.yaml algorithm.kl.mode = me") == ["measure"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_meaning_too(shell: str) -> None:
    assert any(
        "groups that one rollout step trains on." in line for line in complete("dapo train r.yaml rollout.", shell)
    )


def test_shipped_recipes_and_else_what_the_shell_finds() -> None:
    assert complete("dapo train gsm") == complete("dapo config gsm") == ["gsm8k-1gpu"]
    Path("recipes").mkdir()
    Path("recipes/a.yaml").touch()
    assert complete("dapo train rec") == [], "bash is told to complete files by itself then (-o default)"


def test_options_of_inspect_and_config() -> None:
    assert complete("dapo config --key algorithm.kl.es") == ["algorithm.kl.estimator"]
    assert complete("dapo inspect runs/one --sort l") == ["length"]


def test_the_scripts_can_be_shown() -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "from dapo.commands import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0 and "complete -o default -F" in done.stdout


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys\nfrom dapo.commands import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', *({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environment = {
        **os.environ,
        "_-C_COMPLETE": "complete_bash",
        "COMP_WORDS": "-c train r.yaml seed",
        "COMP_CWORD": "3",
    }
    environment["__C_COMPLETE"] = "complete_bash"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split("\n")[:3] == ["seed=", "seed=0", "HEAVY"], (done.stdout, done.stderr)
