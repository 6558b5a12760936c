"""The faults, each with what is demanded of a run that suffers it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fault_harness import STEPS, Ended, Fault, Kept, Stage, newest
from fault_inside import Strike

from dapo.observe.metrics import read_metrics
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import read_samples
from dapo.orchestrator.encoded_state import read_state
from dapo.records import Sample

RESUMABLE = 75
ERROR, RECIPE, STOPPED_EARLY, OURS = 1, 2, 3, 70
SIGKILLED = (-signal.SIGKILL,)

# --- killed, and asked to stop ------------------------------------------------------------------------------------


def struck(point: str, what: str, *changes: str, **details: object) -> Callable[[Stage], Ended]:
    """A run that a fault strikes inside."""
    strike = Strike(point, what, **details)  # type: ignore[arg-type]
    return lambda stage: stage.start(*changes, strikes=[strike]).end()


SEED = int(os.environ.get("DAPO_FAULT_SEED") or time.time_ns() % 10**6)
"""Of the moments that nobody chose; the table says it, so that they can be had again."""
KILLS, DRAWS = 10, 5


def killed_at(number: int, *changes: str, first: int = 1) -> Callable[[Stage], Ended]:
    """SIGKILL at a random moment between the first and the last step. A run that was done before it came was not
    tried: another moment is drawn. ``changes`` to the recipe; ``first``: line of the metrics to wait for at least."""

    def do(stage: Stage) -> Ended:
        rng = random.Random(f"{SEED}-{number}")
        for late in range(DRAWS):  # noqa: B007 - how many came too late is told below
            line, pause = rng.randint(first, 8), rng.uniform(0, 0.25)
            running = stage.start(*changes)
            running.until(lambda line=line: stage.lines() >= line)  # type: ignore[misc]
            time.sleep(pause)
            if running.poll() is None:
                running.send(signal.SIGKILL)
            ended = running.end(since=time.monotonic())
            if ended.code != 0:
                break
            shutil.rmtree(stage.run)
        too_late = f", {late} not tried (done before)" if late else ""
        return replace(ended, note=f"seed {SEED}: {pause:.3f} s after line {line}{too_late}")

    return do


AHEAD = ("rollout.max_staleness=1", "runtime.deterministic=false", "run.save_every=1", "run.keep_last=9")


def killed_ahead(number: int) -> Callable[[Stage], Ended]:
    """SIGKILL at a random moment of a run that samples ahead, once it has a checkpoint."""

    def do(stage: Stage) -> Ended:
        ended = killed_at(number, *AHEAD, first=4)(stage)
        buffer = read_state(newest(stage))["buffer"]
        kept = [[g.draw, s.index, s.text, ends(s)] for g in buffer["under_way"] for s in g.samples if s.scored]
        stage.file("kept.json", json.dumps(kept))
        return replace(ended, note=f"{ended.note}, {len(kept)} samples kept")

    return do


def ends(sample: Sample) -> list[int]:
    """The versions of its first and its last token, as a line of samples has them."""
    return [int(sample.versions[0]), int(sample.versions[-1])] if sample.length else []


def accounted_for(stage: Stage) -> str | None:
    """Each draw is in the samples of one step, those that had come as they were, and the counts add up."""
    buffer = read_state(newest(stage))["buffer"]
    counts, here = buffer["counts"], len(buffer["under_way"]) + len(buffer["carried"])
    found: dict[tuple[int, int], tuple[str, list[int]]] = {}
    trained, settled = set(), set()
    for path in sorted(RunFolder(stage.run).samples.glob("step-?????.jsonl")):
        lines = list(read_samples(path))
        if twice := settled & {line["draw"] for line in lines}:
            return f"draws {sorted(twice)} are in two steps"
        settled |= {line["draw"] for line in lines}
        trained |= {line["draw"] for line in lines if line["status"] == "kept"}
        found |= {(line["draw"], line["index"]): (line["response"], line["versions"]) for line in lines}
    for draw, index, *kept in json.loads((stage.folder / "kept.json").read_text()):
        if draw in settled and found[draw, index] != tuple(kept):
            return f"sample {index} of draw {draw} had come, and is another one now"
    produced = counts.pop("produced")
    if produced != buffer["draws"] or produced != sum(counts.values()) + here:
        return f"{produced} draws, but {counts} and {here} that go on"
    if counts["trained"] != len(trained) or produced != len(settled) + here:
        return f"{counts} and {here} that go on, but {len(trained)} of {len(settled)} draws were trained on"
    return None


KILLED = [
    *(
        Fault(
            f"kill -9 at a random moment of sampling ahead ({n})",
            killed_ahead(n),
            SIGKILLED,
            Kept.GOES_ON,
            seconds=5,
            also=accounted_for,
            ci=n == 0,
        )
        for n in range(KILLS)
    ),
    *(
        Fault(f"kill -9 at a random moment ({n})", killed_at(n), SIGKILLED, Kept.RESUMED, seconds=5)
        for n in range(KILLS)
    ),
    *(
        Fault(
            f"kill -9 inside of a save, at its file {call}",
            struck("save", "signal", lines=3, call=call, target="SIGKILL"),
            SIGKILLED,
            Kept.RESUMED,
            seconds=5,
            ci=call == 4,
        )
        for call in (1, 4, 9)
    ),
    Fault(
        "kill -9 before its first line is written",
        struck("metrics", "signal", target="SIGKILL"),
        SIGKILLED,
        Kept.RESUMED,
        seconds=5,
    ),
]

STOPPED = [
    *(
        Fault(
            f"{name} in the phase {point}",
            struck(point, "signal", lines=lines, call=call, target=name),
            (RESUMABLE,),
            Kept.RESUMED,
            ("dapo train --resume",),
            seconds=15,
            ci=(name, point) in (("SIGTERM", "update"),),
        )
        for name, point, lines, call in (
            ("SIGTERM", "rollout", 3, 9),
            ("SIGTERM", "prepare", 4, 1),
            ("SIGTERM", "update", 4, 2),
            ("SIGTERM", "save", 3, 3),
            ("SIGTERM", "evaluation", 4, 1),
            ("SIGHUP", "rollout", 4, 2),
            ("SIGUSR1", "update", 4, 1),
            ("SIGUSR2", "save", 4, 1),
            ("SIGINT", "update", 5, 1),
            ("SIGINT", "rollout", 5, 5),
        )
    ),
    Fault(
        "SIGTERM twice, in an update that does not end",
        struck("update", "signal twice", lines=4, target="SIGTERM"),
        (128 + signal.SIGTERM,),
        Kept.RESUMED,
        ("second signal",),
        seconds=8,
    ),
    Fault(
        "SIGINT twice, in an update that does not end",
        struck("update", "signal twice", lines=4, target="SIGINT"),
        (128 + signal.SIGINT,),
        Kept.RESUMED,
        ("second signal",),
        seconds=8,
    ),
    Fault(
        "SIGTERM in an update that takes longer than there is time",
        struck("update", "signal and hang", "run.stop_within_s=3", lines=4, target="SIGTERM"),
        (RESUMABLE,),
        Kept.RESUMED,
        ("run.stop_within_s", "checkpoint"),
        seconds=8,
    ),
]

# --- disk and files -----------------------------------------------------------------------------------------------


def mounted(folder: Path, size: str) -> bool:
    """Whether a small file system of its own could be mounted there, which only root may."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def disk_full(stage: Stage, point: str, lines: int, call: int = 1) -> Ended:
    """A tmpfs that fills up just before something is written; where none can be mounted, that write fails so."""
    disk = stage.folder / "disk"
    if not mounted(disk, "64m"):
        return stage.start(strikes=[Strike(point, "no space", lines, call, always=True)]).end()
    stage.clean_up.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
    stage.run = disk / "run"
    return stage.start(strikes=[Strike(point, "fill the disk", lines, call, target=str(disk / "ballast"))]).end()


def make_room(stage: Stage) -> None:
    (stage.folder / "disk" / "ballast").unlink(missing_ok=True)


def read_only(stage: Stage) -> Ended:
    """A file system that nothing can be written to; without root, a folder of which one has not the right."""
    disk = stage.folder / "disk"
    if mounted(disk, "1m"):
        stage.clean_up.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        disk.chmod(0o555)
    stage.run = disk / "run"
    return stage.start().end()


def damaged(stage: Stage, file: str, how: Callable[[bytes], bytes]) -> Ended:
    """Resuming a run whose newest checkpoint has a bad file."""
    shutil.copytree(stage.scene.stopped, stage.run)
    (path,) = stage.run.glob(f"checkpoints/step-00006/{file}")
    path.write_bytes(how(path.read_bytes()))
    return stage.resume().end()


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_a_flipped_bit(content: bytes) -> bytes:
    """In the middle of its last quarter: of a safetensors file, in a tensor."""
    place = len(content) * 7 // 8
    return content[:place] + bytes([content[place] ^ 0b0100_0000]) + content[place + 1 :]


def in_use(stage: Stage, again: Callable[[Stage], Ended]) -> Ended:
    """A second process in the folder of one that is at work; the first one must not notice."""
    held = stage.folder / "go-on"
    first = stage.start(strikes=[Strike("metrics", "wait", lines=3, target=str(held))])
    first.until(Path(f"{held}.waiting").exists)
    stage.marker.unlink(missing_ok=True)
    second = again(stage)
    held.touch()
    done = first.end()
    assert done.code == 0, done.output
    return second


def unwritable_cache(stage: Stage) -> Ended:
    """Rows of more than is kept in memory (8 MiB), and a cache that is no folder."""
    lines = stage.scene.recipe.with_name("train.jsonl").read_text().splitlines()
    rows = stage.file("large.jsonl", "".join(line + " " * 300_000 + "\n" for line in lines))
    no_folder = stage.file("no-folder", "")
    stage.overrides = [f"data.train={rows}"]
    return stage.start(environment={"DAPO_CACHE": str(no_folder / "cache")}).end()


DISK = [
    *(
        Fault(
            f"disk full while {what} is written",
            partial(disk_full, point=point, lines=lines, call=call),
            (ERROR,),
            Kept.RESUMED,
            ("No space left", *names),
            seconds=20,
            mend=make_room,
        )
        for what, point, lines, call, names in (
            ("a line of metrics", "metrics file", 4, 1, ("metrics", "checkpoint")),
            ("the file of a step's tokens", "samples", 4, 1, ("samples", "checkpoint")),
            ("the file of a step's texts", "samples", 4, 2, ("samples", "checkpoint")),
            ("a checkpoint's model", "model", 4, 1, ("checkpoint",)),
            ("a checkpoint's tokenizer", "tokenizer", 4, 1, ("checkpoint",)),
            ("a checkpoint's optimizer", "optimizer", 4, 1, ("checkpoint",)),
            ("the model after the run", "model", STEPS + 1, 2, ("model-after",)),
            ("the tokenizer after the run", "tokenizer", STEPS + 1, 2, ("model-after",)),
        )
    ),
    Fault("run folder cannot be written to", read_only, (ERROR,), Kept.NOTHING_BEGUN, ("run.dir",), seconds=30),
    *(
        Fault(
            f"newest checkpoint: {what} {file}",
            partial(damaged, file=file, how=how),
            (0,),
            Kept.DONE,
            ("step-00006", "step-00004"),
            seconds=60,
            ci=(file, how) == ("model/model.safetensors", half),
        )
        for what, how in (("half of", half), ("a flipped bit in", with_a_flipped_bit))
        for file in ("model/model.safetensors", "optimizer/*.safetensors", "state.json")
    ),
    Fault(
        "a second run in the folder of one at work",
        partial(in_use, again=lambda stage: stage.start().end()),
        (ERROR,),
        Kept.DONE,
        ("run.dir", "exists"),
        seconds=30,
    ),
    Fault(
        "a run at work is resumed a second time",
        partial(in_use, again=lambda stage: stage.resume().end()),
        (ERROR,),
        Kept.DONE,
        ("another process",),
        seconds=30,
    ),
    Fault("DAPO_CACHE cannot be written to", unwritable_cache, (0,), Kept.DONE),
]

# --- rewards ------------------------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Who asked has gone."""


class RewardService:
    """A reward server over real sockets, which goes wrong once the file ``bad`` is there."""

    def __init__(self, stage: Stage, how: str) -> None:
        self.bad, self._how = stage.folder / "bad", how
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                items = json.loads(self.rfile.read(int(self.headers["content-length"])))["items"]
                found: list[object] = [sum(map(ord, item["response"])) % 4 == 0 for item in items]
                if service.bad.exists():
                    found = service.spoil(found)
                body = json.dumps({"results": found}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._handler, self._slow, self.port = Handler, 2, 0
        self.open()

    def spoil(self, found: list[object]) -> list[object]:
        if self._how == "slow for a while" and self._slow:
            self._slow -= 1
            time.sleep(4)
        elif self._how == "slow":
            time.sleep(30)
        elif self._how == "not a number":
            return [float("nan") for _ in found]
        elif self._how == "one too few":
            return found[:-1]
        return found

    def open(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self._handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        if self._how in ("refuses", "moves"):
            threading.Thread(target=self._refuse_once_bad, daemon=True).start()

    def _refuse_once_bad(self) -> None:
        while not self.bad.exists():
            time.sleep(0.005)
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def served(stage: Stage, how: str) -> Ended:
    """A run whose reward is served, by a server that goes wrong in the fourth step."""
    service = RewardService(stage, how)
    stage.clean_up.callback(service.close)
    settings = f"kind: http, url: '{service.url}', timeout_s: 2, give_up_after_s: 4, max_error_rate: 0.2"
    stage.overrides = [f"reward={{{settings}}}"]
    strikes = [Strike("metrics", "touch", lines=3, target=str(service.bad))]
    if how in ("refuses", "moves"):  # and time for the server to be gone
        strikes.append(Strike("metrics", "signal", lines=3, target="SIGCONT"))
    ended = stage.start(strikes=strikes).end()
    service.bad.unlink(missing_ok=True)
    if how == "moves":
        service.port = 0
    if how in ("refuses", "moves"):
        service.open()
        stage.again = [f"reward.url={service.url}"] if how == "moves" else []
    return ended


BAD = "__import__('pathlib').Path(__file__).with_name('bad')"
"""A file beside a reward function; once it is there, the function goes wrong."""


def scored_by(stage: Stage, body: str, changes: Sequence[str] = ()) -> Ended:
    """A run whose reward function goes wrong in the fourth step."""
    code = "import os, time\n\ndef reward(prompt, response, answer):\n"
    code += f"    bad = {BAD}\n{body}\n    return sum(map(ord, response)) % 4 == 0\n"
    stage.overrides = [f"reward.function={stage.file('reward.py', code)}:reward", "reward.timeout_s=1", *changes]
    strike = Strike("metrics", "touch", lines=3, target=str(stage.folder / "bad"))
    ended = stage.start(strikes=[strike]).end()
    (stage.folder / "bad").unlink(missing_ok=True)
    return ended


HANGS = "    if bad.exists(): time.sleep(1e6)"
DIES_ONCE = "    if bad.exists(): bad.unlink(); os.kill(os.getpid(), 9)"
DIES = "    if bad.exists(): os.kill(os.getpid(), 9)"
STARVES = [f"algorithm.filter_groups.{change}" for change in ("on_starved=stop", "max_num_gen_batches=4")]
ALWAYS_WRONG = "    if bad.exists(): return False"

REWARDS = [
    *(
        Fault(
            f"reward server {how}",
            partial(served, how=how),
            (ERROR,),
            Kept.RESUMED,
            ("http://127.0.0.1", *cause, "dapo train --resume"),
            seconds=40,
        )
        for how, cause in (
            ("refuses", ("connect",)),
            ("moves", ("connect",)),
            ("slow", ("2 s",)),
            ("not a number", ("nan",)),
            ("one too few", ("results",)),
        )
    ),
    Fault("reward server slow for a while", partial(served, how="slow for a while"), (0,), Kept.DONE),
    Fault(
        "reward function hangs",
        partial(scored_by, body=HANGS),
        (ERROR,),
        Kept.RESUMED,
        ("reward function", "1 s", "dapo train --resume"),
        seconds=40,
    ),
    Fault("a pool worker is killed", partial(scored_by, body=DIES_ONCE), (0,), Kept.DONE, seconds=30),
    Fault(
        "pool workers are killed again and again",
        partial(scored_by, body=DIES),
        (ERROR,),
        Kept.RESUMED,
        ("reward function", "killed", "dapo train --resume"),
        seconds=40,
    ),
    Fault(
        "all groups are filtered",
        partial(scored_by, body=ALWAYS_WRONG, changes=STARVES),
        (STOPPED_EARLY,),
        Kept.GOES_ON,
        ("all wrong", "dapo train --resume"),
        seconds=30,
        ci=True,
    ),
]

# --- inside -------------------------------------------------------------------------------------------------------


def skipped(stage: Stage, wanted: int) -> str | None:
    """What is wrong with the number of updates that the metrics call skipped."""
    found = sum(entry.get("updates/skipped", 0) for entry in read_metrics(RunFolder(stage.run).metrics))
    return None if found == wanted else f"{found} updates are counted as skipped, not {wanted}"


def with_a_reader_that_goes_away(stage: Stage) -> Ended:
    """``dapo train RECIPE | head -1``."""
    pipe = stage.folder / "pipe"
    os.mkfifo(pipe)
    running = stage.start(reader=str(pipe))
    with pipe.open() as reader:
        reader.readline()
    return running.end()


def limited(stage: Stage) -> Ended:
    return stage.start(strikes=[Strike("update", "no memory", lines=4)]).end()


INSIDE = [
    Fault(
        "one gradient is NaN",
        struck("update", "nan", lines=4, call=2),
        (0,),
        Kept.FINISHED,
        ("not finite", "down_proj"),
        also=partial(skipped, wanted=1),
        ci=True,
    ),
    Fault(
        "every gradient is NaN",
        struck("update", "nan", lines=4, always=True),
        (STOPPED_EARLY,),
        Kept.GOES_ON,
        ("not finite", "down_proj", "dapo train --resume"),
        seconds=20,
    ),
    Fault(
        "the engine raises",
        struck("rollout", "raise", lines=4, call=7, target="the engine is broken"),
        (ERROR, OURS),
        Kept.RESUMED,
        ("the engine is broken", "dapo train --resume"),
        seconds=15,
    ),
    Fault(
        "no memory is left in an update",
        limited,
        (ERROR,),
        Kept.RESUMED,
        ("memory ran out", "What takes less: ", "dapo train --resume"),
        seconds=15,
    ),
    Fault("the clock jumps ten years ahead", struck("metrics", "clock", lines=3, target="3.2e8"), (0,), Kept.DONE),
    Fault("the clock jumps a day back", struck("metrics", "clock", lines=3, target="-86400"), (0,), Kept.DONE),
    Fault("standard output is closed", with_a_reader_that_goes_away, (0,), Kept.DONE),
]

# --- mistakes of the user's ---------------------------------------------------------------------------------------


def bad_rows(stage: Stage) -> Ended:
    good = stage.scene.recipe.with_name("train.jsonl").read_text().splitlines()
    rows = stage.file("bad.jsonl", "\n".join([*good[:2], '{"prompt": "1+', *good[3:6], '{"answer": "1"}', *good[6:]]))
    return stage.start(f"data.train={rows}").end()


def too_few_rows(stage: Stage) -> Ended:
    good = stage.scene.recipe.with_name("train.jsonl").read_text().splitlines()
    return stage.start(f"data.train={stage.file('few.jsonl', chr(10).join(good[:3]))}").end()


def changed(*changes: str) -> Callable[[Stage], Ended]:
    return lambda stage: stage.start(*changes).end()


MISTAKES = [
    Fault(
        "bad rows",
        bad_rows,
        (RECIPE,),
        Kept.NOTHING_BEGUN,
        ("bad.jsonl:3", "bad.jsonl:7", "prompt"),
        seconds=20,
        ci=True,
    ),
    Fault(
        "an unknown key",
        changed("training.learning_rte=1e-6"),
        (RECIPE,),
        Kept.NOTHING_BEGUN,
        ("learning_rte", "training.learning_rate"),
        seconds=10,
        ci=True,
    ),
    Fault(
        "fewer rows than a step needs",
        too_few_rows,
        (RECIPE,),
        Kept.NOTHING_BEGUN,
        ("3 usable prompts", "rollout.prompts_per_step"),
        seconds=20,
        ci=True,
    ),
    Fault(
        "no such model",
        changed("model.path=./no-such-model"),
        (ERROR, RECIPE),
        Kept.NOTHING_BEGUN,
        ("no-such-model", "no such folder"),
        seconds=20,
    ),
]

FAULTS = [*KILLED, *STOPPED, *DISK, *REWARDS, *INSIDE, *MISTAKES]
