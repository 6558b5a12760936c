"""AdamW's moments in 8 bits: right on average, in a quarter of the memory, and the same after a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import SHAPE, make_inputs, make_trainer, packed, random_groups, weights_of

from dapo.algorithm.objective import DapoObjective
from dapo.errors import UserError
from dapo.training.checkpoint import load_optimizer, load_tensors
from dapo.training.moments import StoredAdamW, decode, encode, moment_bytes
from dapo.training.snapshot import expected_bytes, load_snapshot, snapshot, snapshot_bytes, write_snapshot
from helpers import random_model


def wide(seed: int) -> Any:
    return random_model("qwen2", seed, hidden_size=128, intermediate_size=256)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_largest_in_a_block_is_exact_and_the_rest_within_an_eighth(signed: bool) -> None:
    values = torch.logspace(-4, 0, 1280) * 0.3
    values = values * torch.where(torch.arange(1280) % 3 == 0, -1.0, 1.0) if signed else values
    codes, scales = encode(values, signed, noise())
    found = decode(codes, scales, signed)
    largest = values.view(-1, 128).abs().argmax(1) + 128 * torch.arange(10)
    torch.testing.assert_close(found[largest], values[largest], rtol=1e-6, atol=0)
    assert codes.dtype == torch.uint8 and scales.tolist() == values.view(-1, 128).abs().amax(1).tolist()
    assert ((found - values).abs() <= values.abs() / 8 + 1e-9).all()


@pytest.mark.parametrize(("signed", "small"), [(True, 0.7), (True, -1e-3), (True, 1e-6), (False, 0.3), (False, 1e-6)])
def test_rounding_is_right_on_average(signed: bool, small: float) -> None:
    """1e-6 with a sign is below the 2^-16 of the largest from which on the codes are evenly spaced."""
    values = torch.full((2**20,), small)
    values[::128] = 1.0
    found = decode(*encode(values, signed, noise()), signed).view(-1, 128)[:, 1:]
    assert abs(float(found.double().mean()) / small - 1) < 0.005
    assert len(found.unique()) == 2, "the codes on either side"


def test_of_a_block_of_zeros_nothing_is_made() -> None:
    for signed in (True, False):
        assert torch.equal(decode(*encode(torch.zeros(256), signed, noise()), signed), torch.zeros(256))


def test_a_second_moment_is_never_zero_beside_a_large_one() -> None:
    values = torch.zeros(128)
    values[0] = 8.0
    assert float(decode(*encode(values, False, noise()), False)[1:].max()) == 8 * 1.125 * 2**-32


@pytest.mark.parametrize(("gradient", "expected"), [(1.0, 0.724), (0.0, 0.092)])
def test_a_second_moment_neither_stalls_nor_sticks(gradient: float, expected: float) -> None:
    """From 0.25, beside a 1.0 that stays: 1000 steps of 0.999 v + 0.001 g^2 leave 0.3677 of the distance to g^2. A step
    of 0.00075 or less is lost at once where codes are 0.03 apart and the nearest is taken."""
    generator, wanted = noise(), torch.full((1280,), gradient)
    wanted[::128] = 1.0
    values = torch.full((1280,), 0.25)
    values[::128] = 1.0
    for _ in range(1000):
        values = decode(*encode(0.999 * values + 0.001 * wanted**2, False, generator), False)
    assert float(values.view(-1, 128)[:, 1:].mean()) == pytest.approx(expected, rel=0.03)


def test_a_first_step_is_that_of_adamw_and_later_ones_are_on_average() -> None:
    """From zero moments the first step is made before anything is rounded; after 50 on a quadratic both are as near."""
    start = torch.randn(64, 128, generator=noise(1))
    plain, narrow = (torch.nn.Parameter(start.clone()) for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, "fused": True}
    optimizers = torch.optim.AdamW([plain], **settings), StoredAdamW([narrow], kind="int8", part=1024, **settings)
    for step in range(50):
        for optimizer, parameter in zip(optimizers, (plain, narrow), strict=True):
            parameter.grad = parameter.detach().clone()
            optimizer.step()
        if not step:
            assert torch.equal(plain, narrow)
    ours, theirs = (p.detach() - start for p in (narrow, plain))
    assert float(ours.norm()) == pytest.approx(float(theirs.norm()), rel=0.02)
    assert float((ours - theirs).norm()) < 0.1 * float(theirs.norm())
    assert optimizers[1].state[narrow]["exp_avg"].dtype == torch.uint8


def test_norms_biases_and_tensors_of_no_whole_blocks_stay_float32() -> None:
    values = [torch.nn.Parameter(torch.ones(size)) for size in (4096, 4095, 128, 4224)]
    optimizer = StoredAdamW(values, kind="int8", lr=1e-2, fused=True)
    for parameter in values:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kinds = [optimizer.state[p]["exp_avg"].dtype for p in values]
    assert kinds == [torch.uint8, torch.float32, torch.float32, torch.uint8]
    for parameter in values:
        kept = [t for name, t in optimizer.state[parameter].items() if name != "step"]
        assert sum(t.numel() * t.element_size() for t in kept) == moment_bytes(parameter.numel(), "int8")
    assert moment_bytes(4096, "int8") == 2 * 4096 + 2 * 4 * 32 and moment_bytes(4096, "float32") == 8 * 4096


@pytest.mark.parametrize("offload", [False, True])
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path, offload: bool) -> None:
    settings = {"moments": "int8", "offload_optimizer": offload, "learning_rate": 1e-3}
    batch = packed(random_groups(SHAPE))
    whole, other = (make_trainer(wide(seed), **settings) for seed in (0, 1))

    def update(trainer, step):  # type: ignore[no-untyped-def]
        trainer.begin_step(step)
        assert trainer.update(batch, make_inputs(batch), DapoObjective()).skipped is None

    for step in range(3):
        update(whole, step)
    frozen = snapshot(whole)
    assert 0 <= snapshot_bytes(frozen) - expected_bytes(whole) < 1000, "a number for each parameter: Adam's step"
    assert expected_bytes(whole) < 0.6 * 12 * sum(p.numel() for p in whole.policy.model.parameters())
    write_snapshot(frozen, tmp_path)
    load_snapshot(other, tmp_path)
    for step in range(3, 6):
        update(whole, step)
        update(other, step)
    assert torch.equal(weights_of(whole), weights_of(other))
    tensors, counters = load_tensors(tmp_path / "optimizer")
    name = next(name for name in tensors if name.endswith("exp_avg_scale"))
    with pytest.raises(UserError, match=f"no parameter fits {name}"):
        load_optimizer(other._optimizer, other._parameters, tmp_path, tensors | {name: tensors[name][1:]}, counters)


def test_draws_go_on_where_no_parameter_had_a_gradient_in_every_step() -> None:
    def optimized() -> tuple[list[torch.nn.Parameter], StoredAdamW]:
        values = [torch.nn.Parameter(torch.linspace(-1, 1, 8192)) for _ in range(2)]
        return values, StoredAdamW(values, kind="int8", lr=1e-2, fused=True)

    def step(values: list[torch.nn.Parameter], optimizer: StoredAdamW, number: int) -> None:
        optimizer.zero_grad()
        values[number % 2].grad = values[number % 2].detach() ** 3
        optimizer.step()

    (whole, one), (resumed, other) = optimized(), optimized()
    for number in range(4):
        step(whole, one, number)
    for mine, theirs in zip(resumed, whole, strict=True):
        mine.data.copy_(theirs.detach())
    other.load_state_dict(one.state_dict())
    for number in range(4, 8):
        step(whole, one, number)
        step(resumed, other, number)
    assert all(map(torch.equal, whole, resumed))


def test_moments_that_cannot_be_rounded_leave_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights have moved by then, be it in the first part."""
    parameter = torch.nn.Parameter(torch.ones(64, 128))
    optimizer = StoredAdamW([parameter], kind="int8", lr=1e-2, fused=True)

    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    parameter.grad = torch.ones_like(parameter)
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr("dapo.training.moments.encode", run_out)
        optimizer.step()
    assert optimizer.torn and not torch.equal(parameter, torch.ones_like(parameter))


def test_more_tensors_take_no_more_operations() -> None:
    """Each is started by itself, and on a GPU that took far longer than the work."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found[-1] += not call.is_view
            return call(*args, **(kwargs or {}))

    found: list[int] = []
    for tensors in (1, 50):
        values = [torch.nn.Parameter(torch.ones(64, 128)) for _ in range(tensors)]
        optimizer = StoredAdamW(values, kind="int8", lr=1e-2, fused=True)
        for parameter in values:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append(0)
        with Count():
            optimizer.step()
    assert 0 < found[1] <= found[0] + 10


@pytest.mark.gpu
def test_on_a_gpu_8_bits_are_the_same_wherever_they_rest() -> None:
    found = []
    for offload in (False, False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 2**16, device="cuda"))
        optimizer = StoredAdamW([parameter], kind="int8", offload=offload, part=2**12, lr=1e-2, fused=True)
        for _ in range(5):
            parameter.grad = parameter.detach() ** 3
            optimizer.step()
        found.append(parameter.detach())
        assert optimizer.state[parameter]["exp_avg_sq"].device.type == ("cpu" if offload else "cuda")
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
