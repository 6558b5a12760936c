"""Adam's moments in the host's memory: the same numbers, and on a GPU no more of them there than one group's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_cases import SHAPE, make_inputs, make_trainer, packed, random_groups, weights_of

from dapo.algorithm.objective import DapoObjective
from dapo.errors import UserError
from dapo.training import offload
from dapo.training.offload import OffloadedAdamW
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
    offloaded = OffloadedAdamW(ours, group_numbers=1000, **SETTINGS)
    assert [len(group["params"]) for group in offloaded.param_groups] == [1, 2, 1, 1], "6000 | 7 + 400 | 1500 | 1"
    steps(theirs, plain, 3)
    steps(offloaded, ours, 3)
    for number, (one, other) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(one, other), number
    assert {t.device.type for s in offloaded.state.values() for n, t in s.items() if n != "step"} == {"cpu"}
    resumed = OffloadedAdamW(ours, group_numbers=100, **SETTINGS)  # other groups
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
def test_a_gpu_holds_the_moments_of_one_group() -> None:
    values = [torch.nn.Parameter(torch.ones(2**20, device="cuda")) for _ in range(32)]
    optimizer = OffloadedAdamW(values, group_numbers=2**21, **SETTINGS)
    for parameter in values:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before < 3 * 2 * 4 * 2**21, "of 16 groups"
        assert torch.cuda.memory_allocated() - before < 2**16
    moments = optimizer.state[values[0]]
    assert moments["exp_avg"].is_pinned() and moments["exp_avg_sq"].is_pinned()


def test_a_trainer_learns_and_goes_on_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(OffloadedAdamW):
        def __init__(self, parameters, **settings):  # type: ignore[no-untyped-def]
            super().__init__(parameters, group_numbers=4000, **settings)

    monkeypatch.setattr("dapo.training.trainer.OffloadedAdamW", Cut)
    batch = packed(random_groups(SHAPE))
    inputs = make_inputs(batch)
    plain, ours = make_trainer(), make_trainer(offload_optimizer=True)
    assert len(ours._optimizer.param_groups) > 3
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


def test_the_largest_group_goes_first_and_a_group_may_be_just_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 + 2 are the 5 that a group holds, and 9 are one of their own: if memory lacks for those, nothing has moved."""
    given = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 9, 4)]
    optimizer = OffloadedAdamW(given, group_numbers=5, **SETTINGS)
    assert [[p.numel() for p in group["params"]] for group in optimizer.param_groups] == [[3, 2], [9], [4]]
    fetched: list[int] = []
    fetch = OffloadedAdamW._fetch
    monkeypatch.setattr(OffloadedAdamW, "_fetch", lambda self, p: (fetched.append(p.numel()), fetch(self, p))[1])
    for parameter in given:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert fetched == [9, 3, 2, 4]


def test_half_an_update_is_not_saved_and_a_failure_before_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out between two groups of parameters."""

    class Cut(OffloadedAdamW):
        def __init__(self, parameters, **settings):  # type: ignore[no-untyped-def]
            super().__init__(parameters, group_numbers=4000, **settings)

    monkeypatch.setattr("dapo.training.trainer.OffloadedAdamW", Cut)
    trainer = make_trainer(offload_optimizer=True)
    batch = packed(random_groups(SHAPE))
    left = [0]

    def fetch(optimizer: Cut, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("out of memory")
        return {}

    monkeypatch.setattr(Cut, "_fetch", fetch)
    before = weights_of(trainer)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.update(batch, make_inputs(batch), DapoObjective())
    assert torch.equal(weights_of(trainer), before)
    left[0] = len(max(trainer._optimizer.param_groups, key=lambda g: sum(p.numel() for p in g["params"]))["params"])
    with pytest.raises(torch.OutOfMemoryError):
        trainer.update(batch, make_inputs(batch), DapoObjective())
    left[0] = 1000
    trainer.update(batch, make_inputs(batch), DapoObjective())  # does not mend it
    for use in (trainer.check_finite, trainer.publish):
        with pytest.raises(UserError, match="an update failed when it had changed some of the weights"):
            use()


def test_memory_to_come_is_that_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = sum(p.numel() for p in make_trainer().policy.model.parameters())
    assert make_trainer().bytes_to_come == 12 * numbers
    assert make_trainer(offload_optimizer=True).bytes_to_come == 12 * numbers, "it is smaller than a group"
    trainer, batch = make_trainer(), packed(random_groups(SHAPE))
    trainer.update(batch, make_inputs(batch), DapoObjective())
    assert trainer.bytes_to_come == 0  # the moments are there, and the gradients gone until the next update
    monkeypatch.setattr("dapo.training.trainer.GROUP_NUMBERS", 1000)
    assert numbers < offload.GROUP_NUMBERS
    assert make_trainer(offload_optimizer=True).bytes_to_come == 4 * numbers + 8 * 1000
