"""Standard output whose reader goes away, or that knows ASCII only."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.commands.shared.errors import complain
from dapo.observe.progress import PlainListener
from dapo.util.pages import Answer, Code, Rows, Section, Text, write_report
from dapo.util.terminal import Terminal, counted


def bash(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        check=False,
    )


def test_a_run_goes_on_when_the_reader_of_its_lines_goes_away(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from dapo.commands.shared.errors import errors_for_people
from dapo.observe.progress import make_listener
with errors_for_people(False):
    listener = make_listener()
    for step in range(3000):
        listener.phase("x" * 100)
    listener.finished(dict(run_dir="r"))
    print("the end")
    pathlib.Path({str(tmp_path / "done")!r}).touch()
"""
    done = bash(f"$PYTHON -c '{code.replace(chr(39), chr(34))}' | head -n 1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == b"" and done.stdout == b"x" * 100 + b"\n"
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("command", ["config", "config --json"])
def test_commands_may_be_piped_to_head(command: str) -> None:
    done = bash(f"$PYTHON -m dapo {command} | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, b"")


def test_progress_on_an_ascii_terminal() -> None:
    code = """
import sys, time
from rich.text import Text
from dapo.observe.progress import LiveListener
from dapo.util.terminal import Terminal, escape_what_cannot_be_written
escape_what_cannot_be_written()
listener = LiveListener(Terminal(force_terminal=True, width=80))
listener.phase("loading")
time.sleep(0.3)
listener.advance(1, 3, "a note: é")
time.sleep(0.3)
listener.warning("π")
listener.finished({"accuracy_before": 0.1, "accuracy_after": 0.9})
"""
    environment = {"PYTHONIOENCODING": "ascii", "TERM": "xterm", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert max(done.stdout) < 128
    assert b"loading" in done.stdout and b"\\u280b" not in done.stdout and b"\\u03c0" in done.stdout


def test_one_is_no_plural() -> None:
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert counted(12345, "sample", ",") == "12,345 samples"


HIDDEN = "a\x1b[31mb\x9bc\u202ed\u200be\x07"
SHOWN = r"a\x1b[31mb\x9bc\u202ed\u200be\x07"


def test_text_of_others_shows_what_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    Terminal(file=stream, width=200).print(HIDDEN, markup=False)
    assert stream.getvalue() == SHOWN + "\n"
    complain(HIDDEN)
    PlainListener(Terminal(stderr=True, width=200)).warning(HIDDEN)
    assert capsys.readouterr().err.splitlines() == [f"error: {SHOWN}", f"warning: {SHOWN}"]


def test_a_report_shows_it_too_in_both_forms(tmp_path: Path) -> None:
    blocks = [Text(HIDDEN), Code(HIDDEN), Rows([HIDDEN], [[HIDDEN]]), Answer(HIDDEN, HIDDEN, HIDDEN)]
    for path in write_report(HIDDEN, [Section("one", blocks)], tmp_path / "report"):
        text = path.read_text()
        assert all(character.isprintable() or character == "\n" for character in text)
        assert text.count("x1b") >= 7 and text.count("u202e") >= 7 and text.count("u200b") >= 7


RUN = """
import pathlib, sys
from dapo.commands.shared.errors import errors_for_people
from dapo.observe.progress import make_listener
from dapo.util.terminal import open_closed_streams
open_closed_streams()
with errors_for_people(False, output_is_result=False):
    listener = make_listener()
    for step in range(20):
        listener.phase("x" * 1000)
    listener.warning("odd")
    make_listener(quiet=True).warning("quiet")
    first = open("first", "w")  # takes the lowest free number
    listener.finished(dict(run_dir="r"))
    print("the end", flush=True)
    first.close()
    pathlib.Path("done").touch()
"""
"""A run as far as output goes; beside it, a file that is opened later."""


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (">&-", ["standard output is closed"]),
        (">&- 2>&-", []),
        ("<&- >&- 2>err", ["standard output is closed"]),
        (">/dev/full", ["standard output cannot be written to (No space left on device)"]),
        ("2>/dev/full >out", []),
        (">/dev/full 2>/dev/full", []),
        (">/dev/full 2>&-", []),
        ("1</dev/null", ["standard output cannot be written to (Bad file descriptor)"]),
    ],
)
def test_a_run_goes_on_without_its_output_and_says_so_once(tmp_path: Path, where: str, told: list[str]) -> None:
    (tmp_path / "run.py").write_text(RUN)
    done = bash(f"cd {tmp_path}; $PYTHON run.py {where}", COLUMNS="80")
    said = done.stderr.decode() + "".join(path.read_text() for path in tmp_path.glob("err"))
    assert done.returncode == 0 and (tmp_path / "done").exists(), said
    assert [line.removeprefix("warning: ").partition(":")[0] for line in said.splitlines()][: len(told)] == told
    assert len(said.splitlines()) == len(told) + ("2>" not in where or "err" in where)  # and the quiet warning
    assert (tmp_path / "first").read_text() == ""


@pytest.mark.parametrize(
    ("command", "code"), [("data check d.jsonl", 1), ("data check bad.jsonl", 2), ("train r.yaml --dry-run", 1)]
)
def test_a_result_that_a_full_disk_has_no_room_for_is_no_success(tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "bad.jsonl").write_text('{"answer": "2"}\n')
    (tmp_path / "r.yaml").write_text("data: {train: d.jsonl}\nmodel: {path: none}\nreward: {kind: math}\n")
    done = bash(f"cd {tmp_path}; $PYTHON -m dapo {command} >/dev/full")
    assert done.returncode == code and b"No space left on device" in done.stderr, done.stderr
    assert bash(f"cd {tmp_path}; $PYTHON -m dapo data check d.jsonl | true").returncode == 0


@pytest.mark.parametrize("command", ["--help", "--version", "config", "config --json", "config --nonsense"])
def test_a_full_disk_under_what_a_command_is_for_is_an_error_in_one_line(command: str) -> None:
    done = bash(f"$PYTHON -m dapo {command} >/dev/full")
    text = done.stderr.decode()
    if command == "config --nonsense":  # it prints nothing there
        assert done.returncode == 2 and "No such option" in text
    else:
        assert done.returncode == 1
        assert text == "error: standard output or a file: cannot be written to: No space left on device\n"
