"""The loop over roles without tensors: it comes to the same end wherever it is cancelled."""

from __future__ import annotations

import ast
import asyncio
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dapo.orchestrator.loop
from dapo.observe.run_folder import RunFolder
from dapo.records import Group, Prompt
from loop_fakes import Cancelled, World
from run_cases import PROMPTS, run, steps_of, weights_hash, without_times


def whole() -> tuple[World, int]:
    """A run that is not cancelled, and at how many places it waits."""
    world = World()
    work = Cancelled(world.run())

    async def run() -> None:
        await work

    asyncio.run(run())
    return world, work.waits


def cancelled_and_resumed(folder: Path, at: int, late: bool) -> World:
    first = World()

    async def run() -> None:
        await Cancelled(first.run(), at, late)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    first.save(folder)
    again = World()
    again.load(folder, first.written)
    asyncio.run(again.run())
    return again


def test_a_run_over_roles_without_tensors() -> None:
    world, waits = whole()
    assert sorted(world.written) == world.saved == [1, 2] and world.engine.version == 2 and waits > 20
    assert world.engine.weights == world.learner.weights != 0 and world.source.heard


@pytest.mark.parametrize("late", [False, True])
def test_a_run_that_is_cancelled_at_any_of_its_waits_and_resumed_is_the_run_that_was_not(
    late: bool, tmp_path: Path
) -> None:
    """Every wait of two steps, the last one of the run excepted where it cannot be cancelled any more."""
    world, waits = whole()
    wanted, equal = world.result(), 0
    for at in range(1, waits + 1):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        assert cancelled_and_resumed(folder, at, late).result() == wanted, f"cancelled at wait {at} of {waits}"
        equal += 1
    assert equal == waits


REAL = {
    "training.steps": 2,
    "algorithm.proximal": "recompute",
    "algorithm.kl.mode": "reward",
    "algorithm.kl.target": 0.01,
    "evaluation.every": 1,
    "evaluation.samples_per_prompt": 1,
    "run.save_every": 1,
    "run.save_samples": True,
}


def real_run(folder: Path, monkeypatch: pytest.MonkeyPatch, at: int = 0, late: bool = False, **inputs: Any) -> int:
    """A run of a tiny model whose loop is cancelled; at how many places it waited."""
    plain, made = dapo.orchestrator.loop.train, list[Cancelled]()

    async def train(*roles: Any) -> None:
        made.append(Cancelled(plain(*roles), at, late))
        await made[-1]

    with monkeypatch.context() as patch:
        patch.setattr("dapo.orchestrator.experiment.train", train)
        run(folder, REAL, heldout=PROMPTS[:3], **inputs)
    return made[-1].waits


def test_batches_are_made_and_measured_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}
    for place in ("batch_builder.BatchBuilder.build", "batch_builder.BatchBuilder.finish", "recorder.batch_mismatch"):
        owner, name = f"dapo.orchestrator.{place}".rsplit(".", 1)
        plain = getattr(pkgutil.resolve_name(owner), name)

        def noted(*given: Any, plain: Any = plain, name: str = name) -> Any:
            seen[name] = threading.current_thread() is threading.main_thread()
            return plain(*given)

        monkeypatch.setattr(f"{owner}.{name}", noted)
    run(tmp_path / "run", {"algorithm.proximal": "recompute"})
    assert seen == {"build": False, "finish": False, "batch_mismatch": False}


def outcome(folder: Path) -> Any:
    samples = {path.name: path.read_bytes() for path in (folder / "samples").glob("step-*.jsonl")}
    return weights_hash(folder / "model-after"), samples, [without_times(entry) for entry in steps_of(folder)]


@pytest.mark.nightly
@pytest.mark.parametrize("late", [False, True])
def test_a_real_run_that_is_cancelled_at_any_of_its_waits_and_resumed_is_the_run_that_was_not(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = real_run(tmp_path / "whole", monkeypatch)
    wanted = outcome(tmp_path / "whole")
    for at in range(1, waits + 1):
        folder = tmp_path / f"{at}"
        with pytest.raises(asyncio.CancelledError):
            real_run(folder, monkeypatch, at, late)
        run(folder, REAL, heldout=PROMPTS[:3], resume=RunFolder(folder))
        assert outcome(folder) == wanted, f"cancelled at wait {at} of {waits}"
        shutil.rmtree(folder)


class Curriculum:
    """A source that leaves out, for the next 20 draws, each prompt whose samples were all right."""

    def __init__(self, prompts: Any) -> None:
        self.prompts, self.draws = prompts, 0
        self.solved: dict[str, int] = {}
        """Rows, and the draw until which they are left out."""

    def next(self) -> Prompt:
        self.draws += 1
        prompt: Prompt = self.prompts.next()
        while self.solved.get(str(prompt.row), 0) > self.draws:
            prompt = self.prompts.next()
        return prompt

    def feedback(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if all(sample.verdict.correct for sample in group.scored):
                self.solved[str(group.prompt.row)] = self.draws + 20

    def state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state(), "draws": self.draws, "solved": dict(self.solved)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.prompts.load_state(state["prompts"])
        self.draws, self.solved = state["draws"], dict(state["solved"])


def test_a_source_that_hears_what_became_of_its_prompts_goes_on_where_it_was(tmp_path: Path) -> None:
    made: list[Curriculum] = []

    def curriculum(prompts: Any) -> Curriculum:
        made.append(Curriculum(prompts))
        return made[-1]

    def easy(prompt: str, response: str) -> bool:
        return prompt.startswith(("1", "2")) or sum(map(ord, response)) % 2 == 0

    changes = {"training.steps": 4, "run.save_every": 1, "run.save_samples": True}
    run(tmp_path / "whole", changes, source=curriculum, reward=easy)
    run(tmp_path / "two", changes | {"training.steps": 2}, source=curriculum, reward=easy)
    run(tmp_path / "two", changes, source=curriculum, reward=easy, resume=RunFolder(tmp_path / "two"))
    assert outcome(tmp_path / "two") == outcome(tmp_path / "whole")
    assert made[0].state() == made[2].state() and made[0].solved


def test_the_loop_is_short_and_needs_no_tensor_library() -> None:
    source = Path(dapo.orchestrator.loop.__file__).read_text()
    names = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.module}
    assert len(source.splitlines()) <= 100 and len([n for n in names if n.startswith("dapo.")]) <= 12
    blocked = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
    work = "import asyncio\nfrom loop_fakes import World\nworld = World()\nasyncio.run(world.run())\n"
    path = os.pathsep.join(sys.path)
    said = subprocess.run(
        [sys.executable, "-c", f"{blocked}{work}print(sorted(world.written))"],
        capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert said.stdout.strip() == "[1, 2]"


def test_no_class_of_the_orchestrator_knows_more_than_about_a_dozen_things() -> None:
    folder = Path(dapo.orchestrator.loop.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not _is_record(node):
                names = {*_assigned(node)}
                assert len(names) <= 15, f"{path.name}: {node.name} has {len(names)}: {sorted(names)}"


def _is_record(node: ast.ClassDef) -> bool:
    return any("frozen" in ast.unparse(decorator) for decorator in node.decorator_list)


def _assigned(node: ast.ClassDef) -> Any:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self":
            yield inner.attr
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
