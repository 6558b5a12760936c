"""A run folder for the tests of the page: two steps with groups of every kind, one of them with a response that holds
markup; and a server over it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dapo.config import build_config, nested
from dapo.data.template import PromptTemplate
from dapo.environments.trace import Trace
from dapo.observe.metrics import MetricsLog
from dapo.observe.run_folder import RunFolder
from dapo.observe.samples import write_samples
from dapo.observe.spans import write_spans
from dapo.records import Group, Prompt, Reward, Sample
from episodes import END, call, chat_tokenizer, settings
from run_cases import TOKENIZER

SCRIPT = "<script>document.title='owned'</script><b>bold</b>"
RIGHT, WRONG = Reward(True, 1.0, extracted="3"), Reward(False, -1.0, extracted="4")


def made_group(draw: int, verdicts: Sequence[Reward], texts: Sequence[str] | None = None, length: int = 5) -> Group:
    """A group whose samples hold the tokens of ``1+2=3`` (``length`` of them), with these verdicts and texts."""
    ids = np.resize(np.array(TOKENIZER.encode("1+2=3"), np.int32), length)
    samples = tuple(
        Sample(
            draw,
            index,
            ids,
            np.full(length, -0.1 * (index + 1), np.float32),
            np.zeros(length, np.int32),
            "stop",
            text=texts[index] if texts else "1+2=3",
            reward=reward,
            advantage=1.0 if reward.correct else -1.0,
            in_loss=True,
        )
        for index, reward in enumerate(verdicts)
    )
    return Group(draw, Prompt(draw, f"what is {draw}?", (5,), "3"), samples)


def episode_group(draw: int, shorten: bool = False) -> Group:
    """One episode of two turns, and one of four with a long reply, a turn that was cut and a call that cannot be read.
    ``shorten``: the template rewrites earlier turns, so that each of them begins a sequence."""
    template = PromptTemplate(settings().data, chat_tokenizer(shorten=shorten))
    tools = [{"type": "function", "function": {"name": "calculate", "description": "Compute."}}]
    prompt = Prompt(draw, "Make 14.", tuple(template.encode("Make 14.")), "14")
    fails = [(call("calculate", expression="1/0"), "tool_calls"), ("z" * 1600, "length"), ("<tool_call>{", "malformed")]
    works = [(call("calculate", expression="2 * 7"), "tool_calls"), ("It is <answer>14</answer>", "stop")]
    samples = []
    for index, turns in enumerate((works, [*fails, ("<answer>15</answer>", "stop")])):
        trace, messages = Trace(template), [{"role": "user", "content": "Make 14. There is a calculator."}]
        for said, stop in turns:
            opening = trace.open(template.conversation(messages, tools))
            ids = np.array(template.continuing_ids(said + END)[:1500], np.int32)
            reason = "length" if stop == "length" else "stop"
            sample = Sample(draw, 0, ids, np.full(len(ids), -0.2, np.float32), np.zeros(len(ids), np.int32), reason)
            trace.add(opening, sample, stop)
            trace.reward(0.25 if stop == "tool_calls" else 0.0)
            reply = "Error: division by zero " * 60 if index else "14"
            messages += [{"role": "assistant", "content": trace.said(sample)}, {"role": "tool", "content": reply}]
        verdict = {"reward": WRONG if index else RIGHT, "advantage": -1.0 if index else 1.0, "in_loss": True}
        samples.append(replace(trace.sample(draw, index, "done", prompt.token_ids), **verdict))
    return Group(draw, prompt, tuple(samples))


def step_metrics(step: int) -> dict[str, float]:
    return {
        "accuracy": 0.1 * step,
        "reward/mean": float(step),
        "entropy": 1.0 / step,
        "groups/drawn": 3,
        "groups/kept": 1,
        "groups/mixed": 1,
        "groups/all_right": 1,
        "groups/all_wrong": 1,
        "time/wall": 3.0,
        "time/step": 2.75,
        "time/rollout": 1.5,
        "time/reward_wait": 0.5,
        "time/update": 0.75,
        "tokens/generated": 100,
    }


def page_run(root: Path, steps: int = 2, settings: dict[str, object] | None = None) -> RunFolder:
    """Each step has a mixed group (draw 10 * step; its first response is SCRIPT), one all right, one all wrong."""
    given = {"model.path": "some/model", "run.dir": str(root), "reward.kind": "exact", "training.steps": 9}
    folder = RunFolder.create(build_config(nested(given | (settings or {}))), ["dapo", "train", "r.yaml"])
    TOKENIZER.save_pretrained(folder.model_before)
    for step in range(1, steps + 1):
        add_step(folder, step)
    return folder


def add_step(folder: RunFolder, step: int) -> None:
    """What a run writes at the end of a step: the samples, then the metrics."""
    draw = 10 * step
    groups = [
        (made_group(draw, [RIGHT, WRONG], [SCRIPT, "1+2=4"]), "kept"),
        (made_group(draw + 1, [RIGHT, RIGHT]), "all_right"),
        (made_group(draw + 2, [WRONG, WRONG, WRONG], length=7), "all_wrong"),
    ]
    write_samples(folder.samples, step, groups)
    began = 1000.0 + 3 * step
    rollout = [("rollout", began, began + 2.0), ("sampling", began, began + 1.5), ("scoring", began + 0.5, began + 2.0)]
    write_spans(folder.spans, step, [*rollout, ("update", began + 2.0, began + 2.75)])
    with MetricsLog(folder.metrics) as log:
        log.append(step, step_metrics(step))


@contextlib.contextmanager
def served(*folders: Path, token: str | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    """A real server over these folders; gives its address, without the token."""
    from dapo.commands.ui.serving import address_of, make_server
    from dapo.util.serving import listening_socket

    listening = listening_socket(host, [0])
    server = make_server(folders, token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield address_of(listening, None).rstrip("/")
    finally:
        server.should_exit = True
        thread.join(10)
