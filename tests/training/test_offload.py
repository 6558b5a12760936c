"""Adam's moments in the host's memory: the same numbers, and on a GPU no more of them there than a part's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import SHAPE, make_inputs, make_trainer, packed, random_groups, weights_of

from dapo.algorithm.objective import DapoObjective
from dapo.errors import UserError
from dapo.training.moments import StoredAdamW
from dapo.training.snapshot import snapshot

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True}


def parameters(device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(300, 20), (7,), (20, 20), (500, 3), (1,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def steps(optimizer: torch.optim.Optimizer, values: list[torch.nn.Parameter], count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in values[:-1]:  # one never has a gradient
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        optimizer.step()


def same_numbers(device: str) -> None:
    plain, ours = parameters(device), parameters(device)
    theirs = torch.optim.AdamW(plain, **SETTINGS)
    offloaded = StoredAdamW(ours, offload=True, part=1024, **SETTINGS)
    steps(theirs, plain, 3)
    steps(offloaded, ours, 3)
    for number, (one, other) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(one, other), number
    assert {t.device.type for s in offloaded.state.values() for n, t in s.items() if n != "step"} == {"cpu"}
    resumed = StoredAdamW(ours, offload=True, part=128, **SETTINGS)  # other parts
    resumed.load_state_dict(offloaded.state_dict())
    steps(theirs, plain, 2, seed=1)
    steps(resumed, ours, 2, seed=1)
    for number, (one, other) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(one, other), number


def test_the_numbers_are_those_of_adamw() -> None:
    same_numbers("cpu")


@pytest.mark.gpu
def test_the_numbers_are_those_of_adamw_on_a_gpu() -> None:
    same_numbers("cuda")


@pytest.mark.gpu
def test_a_gpu_holds_the_moments_of_one_part() -> None:
    values = [torch.nn.Parameter(torch.ones(2**20, device="cuda")) for _ in range(32)]
    optimizer = StoredAdamW(values, offload=True, part=2**19, **SETTINGS)
    for parameter in values:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before < 3 * 2 * 4 * 2**19, "of 64 parts"
        assert torch.cuda.memory_allocated() - before < 2**16
    moments = optimizer.state[values[0]]
    assert moments["exp_avg"].is_pinned() and moments["exp_avg_sq"].is_pinned()


def test_a_trainer_learns_and_goes_on_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.training.moments.StoredAdamW", partial(StoredAdamW, part=1024))
    batch = packed(random_groups(SHAPE))
    inputs = make_inputs(batch)
    plain, ours = make_trainer(), make_trainer(offload_optimizer=True)
    for trainer in (plain, ours):
        trainer.begin_step(0)
        assert trainer.update(batch, inputs, DapoObjective()).skipped is None
    assert torch.equal(weights_of(plain), weights_of(ours))
    frozen = snapshot(ours)
    frozen.save(tmp_path / "model")
    frozen.save_state(tmp_path / "optimizer")
    resumed = make_trainer(offload_optimizer=True, seed=1)
    resumed.load(tmp_path / "model")
    resumed.load_state(tmp_path / "optimizer")
    for trainer in (plain, resumed):
        trainer.begin_step(1)
        trainer.update(batch, inputs, DapoObjective())
    assert torch.equal(weights_of(plain), weights_of(resumed))
    assert resumed.learning_rate == plain.learning_rate


def test_parts_are_cut_where_blocks_end_and_the_first_is_as_large_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 numbers at most: 3 and 128 of the 300 (not 253), 172 and 84 that are whole, and 256, 128 of the 384."""
    given = [torch.nn.Parameter(torch.ones(size)) for size in (3, 300, 84, 384)]
    optimizer = StoredAdamW(given, offload=True, part=256, **SETTINGS)
    moved: list[list[tuple[int, int, int]]] = []
    monkeypatch.setattr(
        StoredAdamW,
        "_move",
        lambda self, part, *_: moved.append([(p.numel(), here.start, here.stop) for p, here in part]),
    )
    for parameter in given:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert moved == [[(3, 0, 3), (300, 0, 128)], [(300, 128, 300), (84, 0, 84)], [(384, 0, 256)], [(384, 256, 384)]]


def test_half_an_update_is_not_saved_and_a_failure_before_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out between two parts."""

    monkeypatch.setattr("dapo.training.moments.StoredAdamW", partial(StoredAdamW, part=1024))
    trainer = make_trainer(offload_optimizer=True)
    batch = packed(random_groups(SHAPE))
    left = [0]

    move = StoredAdamW._move

    def move_while_there_is_memory(*given: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("out of memory")
        move(*given)

    monkeypatch.setattr(StoredAdamW, "_move", move_while_there_is_memory)
    before = weights_of(trainer)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.update(batch, make_inputs(batch), DapoObjective())
    assert torch.equal(weights_of(trainer), before)
    left[0] = 1
    with pytest.raises(torch.OutOfMemoryError):
        trainer.update(batch, make_inputs(batch), DapoObjective())
    left[0] = 1000
    trainer.update(batch, make_inputs(batch), DapoObjective())  # does not mend it
    for use in (trainer.check_finite, trainer.publish):
        with pytest.raises(UserError, match="an update failed when it had changed some of the weights"):
            use()


def test_memory_to_come_is_that_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = sum(p.numel() for p in make_trainer().policy.model.parameters())
    assert make_trainer().bytes_to_come == 12 * numbers
    assert make_trainer(offload_optimizer=True).bytes_to_come == 12 * numbers, "it is smaller than a part"
    trainer, batch = make_trainer(), packed(random_groups(SHAPE))
    trainer.update(batch, make_inputs(batch), DapoObjective())
    assert trainer.bytes_to_come == 0  # the moments are there, and the gradients gone until the next update
    monkeypatch.setattr("dapo.training.moments.PART", 1000)
    assert make_trainer(offload_optimizer=True).bytes_to_come == 4 * numbers + 8 * 1000
    assert make_trainer(offload_optimizer=True, moments="int8").bytes_to_come == 4 * numbers + 24 * 1000
    narrow = make_trainer(moments="int8")
    assert narrow.bytes_to_come == 4 * numbers + narrow.moment_bytes + 24 * 1000, "in float32 for the time of a step"
