"""What SIGTERM, Ctrl-C and others do to ``dapo train``: a checkpoint and exit code 75, or at once if asked twice."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.observe.checkpoints import Checkpoints
from dapo.util.asynchronous import closed_in_time
from dapo.util.files import json_line
from dapo.util.shutdown import RESUMABLE, Shutdown, awake_for_signals
from run_cases import PROMPTS, TOKENIZER, config_for, last_checkpoint, steps_of, tiny_model, weights_hash

REWARD = "def reward(prompt, response, answer):\n    return sum(map(ord, response)) % 4 == 0\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe on disk, whose run folder is ``run`` beside it."""
    tiny_model().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("".join(map(json_line, PROMPTS)))
    (tmp_path / "reward.py").write_text(REWARD)
    places = {
        "model.path": str(tmp_path / "model"),
        "data.train": "train.jsonl",
        "reward.kind": "function",
        "reward.function": "reward.py:reward",
        "reward.workers": 1,
        "algorithm.filter_groups.on_starved": "train",
        "training.steps": 40,
        "training.learning_rate": 1e-4,
        "run.save_every": 0,
    }
    config = config_for(tmp_path / "run", places)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return tmp_path / "r.yaml"


def start(*words: str, inside: str = "") -> subprocess.Popen[str]:
    """``dapo`` in a process of its own, after some statements that make it slow where a test wants that."""
    code = f"{inside}\nimport sys\nfrom dapo.commands import main\nsys.argv = ['dapo', *{[*words]!r}]\nmain()\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    )


def until(found: Any, process: subprocess.Popen[str], limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not found():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], limit: float) -> tuple[int, str]:
    """Exit code and standard error; a process that takes longer than ``limit`` seconds is a failure."""
    try:
        _, text = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, text


def begun(recipe: Path) -> bool:
    metrics = recipe.parent / "run" / "metrics.jsonl"
    return metrics.exists() and b"\n" in metrics.read_bytes()


SLOW_UPDATE = """
import time
from pathlib import Path
from dapo.training.trainer import Trainer
plain = Trainer.update
def update(self, batch, inputs, objective):
    Path({mark!r}).touch()
    time.sleep({seconds})
    return plain(self, batch, inputs, objective)
Trainer.update = update
"""


OTHERS = [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]


@pytest.mark.parametrize("number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.nightly) for n in OTHERS)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_it_goes_on_to_the_same_weights(
    recipe: Path, number: signal.Signals
) -> None:
    process = start("train", str(recipe), "training.steps=6", inside="")
    until(lambda: begun(recipe), process)
    process.send_signal(number)
    code, text = ended(process, 30)
    run = recipe.parent / "run"
    assert code == RESUMABLE, text
    assert f"stopped by {number.name}, to go on: dapo train --resume {run}" in text and "Traceback" not in text
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped"] == f"interrupted by {number.name}"
    assert Checkpoints(run / "checkpoints").latest_intact(pytest.fail) is not None
    assert ended(start("train", "--resume", str(run)), 60)[0] == 0
    if number == signal.SIGTERM:
        assert ended(start("train", str(recipe), "training.steps=6", f"run.dir={recipe.parent}/whole"), 60)[0] == 0
        assert weights_hash(run / "model-after") == weights_hash(recipe.parent / "whole" / "model-after")
        assert len(steps_of(run)) == 6


@pytest.mark.parametrize("ignored", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_terminal_that_goes_away_ends_the_run_with_a_checkpoint_unless_it_ignores_that(
    recipe: Path, ignored: bool
) -> None:
    """As when an ssh session breaks off: SIGHUP, and from then on every write to the terminal fails."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
        words = ["-m", "dapo", "train", str(recipe), f"training.steps={6 if ignored else 40}"]
        os.execve(sys.executable, [sys.executable, *words], environment)
    while not begun(recipe):
        os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (0 if ignored else RESUMABLE)
    stopped = json.loads((recipe.parent / "run" / "summary.json").read_text())["stopped"]
    assert stopped == ("all steps are done" if ignored else "interrupted by SIGHUP")
    last_checkpoint(recipe.parent / "run")


@pytest.mark.nightly
def test_the_update_at_hand_is_finished_first(recipe: Path) -> None:
    mark = recipe.parent / "updating"
    process = start("train", str(recipe), inside=SLOW_UPDATE.format(mark=str(mark), seconds=1.0))
    until(mark.exists, process)
    process.send_signal(signal.SIGTERM)
    assert ended(process, 30)[0] == RESUMABLE
    assert last_checkpoint(recipe.parent / "run").name == "step-00000-update-00001"


def test_an_update_that_there_is_no_time_for_is_given_up_between_micro_batches(recipe: Path) -> None:
    """Weights and optimizer are those before it, and the run goes on with that update."""
    mark = recipe.parent / "updating"
    process = start("train", str(recipe), "run.stop_within_s=4", inside=SLOW_UPDATE.format(mark=str(mark), seconds=2.5))
    until(mark.exists, process)
    process.send_signal(signal.SIGTERM)
    code, text = ended(process, 15)
    assert code == RESUMABLE and "run.stop_within_s" in text
    saved = last_checkpoint(recipe.parent / "run")
    assert saved.name == "step-00000-rollout"  # no update was made
    assert weights_hash(saved / "model") == weights_hash(recipe.parent / "run" / "model-before")
    assert ended(start("train", "--resume", str(recipe.parent / "run"), "training.steps=1"), 60)[0] == 0


@pytest.mark.nightly
def test_out_of_time_it_ends_with_the_last_checkpoint_and_says_what_it_waited_for(recipe: Path) -> None:
    mark = recipe.parent / "updating"
    process = start("train", str(recipe), "run.stop_within_s=1", inside=SLOW_UPDATE.format(mark=str(mark), seconds=60))
    until(mark.exists, process)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, text = ended(process, 10)
    assert code == RESUMABLE and time.monotonic() - sent < 5
    assert "waited for update 1 of 2, in step 1; there is no checkpoint yet" in text


@pytest.mark.parametrize(
    ("second", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly)]
)
def test_a_second_signal_ends_it_at_once(recipe: Path, second: signal.Signals, code: int) -> None:
    mark = recipe.parent / "updating"
    process = start("train", str(recipe), inside=SLOW_UPDATE.format(mark=str(mark), seconds=60))
    until(mark.exists, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(second)
    assert ended(process, 3)[0] == code
    deadline = time.monotonic() + 3  # its workers notice that it has gone
    while left := _session(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _session(leader: int) -> list[str]:
    """Processes of a session that still run."""
    found = subprocess.run(["ps", "-eo", "sid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in found.splitlines()[1:]]
    return [args for sid, state, args in lines if sid == str(leader) and not state.startswith("Z")]


@pytest.mark.nightly
def test_before_there_is_a_run_folder_there_is_nothing_to_go_on_with(recipe: Path) -> None:
    inside = (
        "import time, dapo.orchestrator.inputs\nfrom pathlib import Path\n"
        f"def load(*a, **k):\n    Path({str(recipe.parent / 'loading')!r}).touch()\n    time.sleep(60)\n"
        "import dapo.orchestrator.build\ndapo.orchestrator.build.load_tokenizer = load\n"
    )
    process = start("train", str(recipe), inside=inside)
    until((recipe.parent / "loading").exists, process)
    process.send_signal(signal.SIGTERM)
    code, text = ended(process, 10)
    assert code == 143 and "stopped by SIGTERM, before the run had begun" in text
    assert not (recipe.parent / "run").exists()


# --- the parts ----------------------------------------------------------------------------------------------------


def test_the_same_signal_passed_on_twice_counts_once() -> None:
    """A terminal sends Ctrl-C to a launcher and to its child, and the launcher passes it on."""
    asked: list[int] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without it
    before = signal.getsignal(signal.SIGTERM)  # Ray's, where a test has started it in this process
    with Shutdown(within_s=60) as shutdown:
        shutdown.ask(lambda: asked.append(1))
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert asked == [1] and shutdown.signal == signal.SIGINT and shutdown.exit_code == 130
        shutdown.run = Path("run")
        assert shutdown.exit_code == RESUMABLE and 55 < shutdown.seconds_left <= 60
    assert signal.getsignal(signal.SIGTERM) == before
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer) and not t.finished.is_set()]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_each_signal_that_leaves_time_is_heard_unless_the_program_was_started_to_ignore_it(name: str) -> None:
    number, asked = signal.Signals[name], list[int]()
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with Shutdown(within_s=60) as shutdown:
            shutdown.ask(lambda: asked.append(1))
            signal.raise_signal(number)
            assert asked == [1] and shutdown.signal == number and shutdown.exit_code == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # as `nohup` does, and `&` in a script with SIGINT
        with Shutdown(within_s=60) as shutdown:
            shutdown.ask(lambda: asked.append(2))
            signal.raise_signal(number)
        assert asked == [1] and shutdown.signal is None and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_the_kernel_repeats_the_signal_of_a_limit_and_that_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.util.shutdown._ECHO_S", 0.0)
    monkeypatch.setattr(Shutdown, "_end", staticmethod(lambda code, text: ends.append(code)))
    ends: list[int] = []
    with Shutdown(within_s=60) as shutdown:
        shutdown.ask(lambda: None)
        for number in (signal.SIGXCPU, signal.SIGXCPU):
            signal.raise_signal(number)
        assert ends == []
        signal.raise_signal(signal.SIGUSR1)
        assert ends == [128 + signal.SIGUSR1]


def test_a_signal_that_another_thread_gets_wakes_the_loop_at_once() -> None:
    """The main thread sleeps in its event loop and does not take the signal: the kernel gives it to a worker."""
    heard: list[float] = []

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(0.3)  # the loop has gone to sleep
        heard.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        heard.append(time.monotonic())

    async def main() -> None:
        with awake_for_signals():
            shutdown.ask(lambda: heard.append(-1.0))
            await asyncio.to_thread(work)
            shutdown.ask(None)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with Shutdown() as shutdown:
            asyncio.run(main())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert heard[1] == -1.0 and len(heard) == 3  # before the work was at its end
    assert signal.set_wakeup_fd(-1) == -1


def test_what_does_not_close_is_not_waited_for() -> None:
    async def hung() -> None:
        while True:
            try:
                await asyncio.sleep(3)
            except asyncio.CancelledError:  # it does not hear of it
                break

    async def failing() -> None:
        raise OSError("broken")

    async def main() -> None:
        started = time.monotonic()
        assert not await closed_in_time(hung, 0.1)
        assert time.monotonic() - started < 1
        with pytest.raises(OSError, match="broken"):
            await closed_in_time(failing, 1)

    asyncio.run(main())


def test_a_run_that_begins_stops_the_clock_of_the_one_that_has_left() -> None:
    """Phases are runs one after the other: half a minute into the second one the process would be ended."""
    with Shutdown() as shutdown:
        shutdown.leave(None)
        (clock,) = shutdown._timers
        assert not clock.finished.is_set()
        shutdown.ask(lambda: None)
        assert clock.finished.is_set()
