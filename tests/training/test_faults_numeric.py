"""Numbers that are not finite, planted one by one: the update is skipped, the place is named, the batch is kept."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_cases import SHAPE, make_group, make_inputs, make_sample, make_trainer, packed, random_groups, weights_of

from dapo.algorithm.objective import DapoObjective, TokenInputs
from dapo.config import TrainingConfig
from dapo.errors import NumericalError
from dapo.model.loading import copy_model, load_model
from dapo.observe.checkpoints import Checkpoints
from dapo.observe.run_folder import RunFolder
from dapo.rollout.engine import EngineError, Request, Sampling
from dapo.rollout.native.engine import NativeEngine
from dapo.training import faults
from dapo.training.faults import FaultFolder, read_fault
from dapo.training.trainer import Trainer
from helpers import random_model
from run_cases import PROMPTS, Recorder, run, steps_of, tiny_model

LAYER = "model.layers.1.mlp"


def decode(ids):
    return " ".join(map(str, ids))


@pytest.fixture
def trainer(tmp_path):
    made = make_trainer()
    made.faults = FaultFolder(tmp_path / "faults", decode)
    return made


@pytest.fixture
def batch():
    return packed(random_groups(SHAPE))


def at(batch, sequence, token):
    """Place of a response token in the ``[R]`` row."""
    return int(batch.response_lengths[:sequence].sum()) + token


def with_number(inputs, name, place, value=math.nan):
    changed = getattr(inputs, name).clone()
    changed[place] = value
    return replace(inputs, **{name: changed})


def plant_in_layer(trainer, value, token=47, name=LAYER):
    """The output of one layer is not finite where it reads a token that one sample alone has."""
    layer = trainer.policy.model.get_submodule(name)
    embedding = trainer.policy.model.get_input_embeddings()
    seen = {}
    embedding.register_forward_hook(lambda _m, given, out: seen.update(ids=given[0]))
    layer.register_forward_hook(lambda _m, _given, out: torch.where((seen["ids"] == token)[..., None], value, out))


def lone_token(groups, draw, index, token=47):
    """Sample ``index`` of ``draw`` alone holds ``token`` at place 2; no other sample or prompt does."""
    found = []
    for group in groups:
        ids = tuple(t % 40 for t in group.prompt.token_ids)
        samples = [replace(s, token_ids=s.token_ids % 40) for s in group.samples]
        if group.draw == draw:
            samples[index].token_ids[2] = token
        found.append(replace(group, prompt=replace(group.prompt, token_ids=ids), samples=tuple(samples)))
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("model.layers.2.mlp", 4),  # the one after that which is read
        # attention over it in the layer above multiplies it with the 0 of the causal mask, in all queries of the
        # sample: those of its response, for the prompt is computed with sample 0
        (LAYER, 2),
    ],
)
def test_a_layer_that_overflows_on_one_sample_is_named_with_it(trainer, value, name, token):
    batch = packed(lone_token(random_groups(SHAPE), draw=2, index=1))
    plant_in_layer(trainer, value, name=name)
    before = weights_of(trainer)
    said = trainer.update(batch, make_inputs(batch), DapoObjective()).skipped
    assert f"whose output is not finite is {name};" in said
    assert f"the log-probability of sample 1 of draw 2, response token {token} " in said
    assert f"(1 of {batch.num_samples} samples)" in said
    assert torch.equal(weights_of(trainer), before) and not trainer._optimizer.state


@pytest.mark.parametrize("name", ["advantages", "proximal_logprobs", "importance"])
def test_what_was_handed_to_the_loss_is_named(trainer, batch, name):
    place = at(batch, 5, 3)
    said = trainer.update(batch, with_number(make_inputs(batch), name, place), DapoObjective()).skipped
    draw, index = batch.draws[5], batch.indices[5]
    assert f"the loss of sample {index} of draw {draw}, response token 4, whose {name} is not finite" in said
    assert "output is not finite" not in said and f"(1 of {batch.num_samples} samples)" in said


def test_a_minus_infinite_log_probability_is_a_fault_though_the_loss_is_finite(trainer, monkeypatch):
    read = type(trainer.policy).read

    def impossible(policy, states, targets, head=None):
        logprobs, entropy = read(policy, states, targets, head)
        return torch.where(targets == 47, -math.inf, logprobs), entropy

    monkeypatch.setattr(type(trainer.policy), "read", impossible)
    batch = packed(lone_token(random_groups(SHAPE), draw=2, index=1))
    report = trainer.update(batch, make_inputs(batch), DapoObjective())
    assert math.isfinite(report.loss) and math.isfinite(report.grad_norm)
    assert "the log-probability of sample 1 of draw 2, response token 3 " in report.skipped


def test_a_loss_with_an_infinite_slope_is_named(trainer, batch):
    def steep(logprobs, entropy, inputs):
        gap = torch.where(inputs.advantages == special, logprobs - logprobs.detach(), logprobs)
        return gap.abs().sqrt().sum() * 1e-3, {}

    special = float(batch.columns["advantages"][at(batch, 2, 4)])
    said = trainer.update(batch, make_inputs(batch), steep).skipped
    assert f"the derivative of the loss of sample {batch.indices[2]} of draw {batch.draws[2]}" in said


def test_a_fault_of_the_backward_pass_names_the_parameter_and_no_sample(trainer, batch):
    name = "model.layers.1.self_attn.q_proj.weight"
    trainer.policy.model.get_parameter(name).register_hook(lambda gradient: gradient * math.inf)
    said = trainer.update(batch, make_inputs(batch), DapoObjective()).skipped
    assert f"first in the gradient of {name} (1 of {len(trainer._parameters)} parameters)" in said
    assert "sample" not in said


def test_bad_gradients_are_in_the_order_of_the_backward_pass(trainer, batch):
    names = list(trainer._parameters)
    for place, name in enumerate(names):
        parameter = trainer._parameters[name]
        parameter.grad = torch.full_like(parameter, math.nan if place in (1, 3, 6) else 0.5)
    found = faults.diagnose(trainer.policy, batch, make_inputs(batch), DapoObjective(), trainer._parameters)
    assert found.gradients == [names[6], names[3], names[1]]
    assert (
        f"first in the gradient of {names[6]}, last in that of {names[1]} (3 of {len(names)} parameters)" in found.cause
    )


def test_gradients_too_large_to_be_added_up(trainer, batch):
    trainer.policy.model.get_parameter(f"{LAYER}.up_proj.weight").register_hook(lambda g: torch.full_like(g, 1e30))
    said = trainer.update(batch, make_inputs(batch), DapoObjective()).skipped
    assert f"too large to be added up, the largest that of {LAYER}.up_proj.weight" in said


def test_damaged_weights_are_told_from_bad_samples(trainer, batch):
    with torch.no_grad():
        trainer.policy.model.get_parameter(f"{LAYER}.up_proj.weight")[3, 3] = math.nan
    with pytest.raises(NumericalError, match=f"weights of {LAYER}.up_proj.weight are not finite after 0 updates"):
        trainer.publish()  # an engine would sample from them
    said = trainer.update(batch, make_inputs(batch), DapoObjective()).skipped
    assert f"the weights of {LAYER}.up_proj.weight are not finite themselves" in said
    assert f"not finite is {LAYER}.up_proj;" in said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("large", [1, 2000, 2**62])
def test_weights_of_any_size_are_looked_at_before_they_go_anywhere(
    trainer, value: float, large: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dapo.training.trainer._LARGE", large)
    for name, parameter in trainer._parameters.items():
        flat, place = parameter.detach().view(-1), parameter.numel() // 2
        before = float(flat[place])
        flat[place] = value
        with pytest.raises(NumericalError, match=f"weights of {name} are not finite"):
            trainer.check_finite()
        flat[place] = before
    flat[:] = torch.finfo(torch.float32).max  # they add up to more than a float holds, and each of them is one
    trainer.check_finite()


def test_masked_tokens_may_hold_anything_and_nothing_is_kept(trainer, tmp_path):
    bad = make_sample([6, 7], logprobs=[math.nan, math.nan], advantage=math.nan, in_loss=False)
    batch = packed([make_group(0, [1], [make_sample([4, 5]), bad])])
    assert trainer.update(batch, make_inputs(batch), DapoObjective()).skipped is None
    assert not (tmp_path / "faults").exists()


def test_the_diagnosis_changes_nothing(trainer, batch):
    """An update after a skipped one is the one that would have been made without it, to the bit."""
    other = make_trainer()
    inputs = make_inputs(batch)
    trainer.update(batch, with_number(inputs, "advantages", 0), DapoObjective())
    for each in (trainer, other):
        assert each.update(batch, inputs, DapoObjective()).skipped is None
    assert torch.equal(weights_of(trainer), weights_of(other))
    assert not any(module._forward_hooks for module in trainer.policy.model.modules())


# --- the dump -----------------------------------------------------------------------------------------------------


def test_the_dump_brings_the_fault_back(trainer, batch, tmp_path):
    trainer.begin_step(11)
    trainer.update(batch, make_inputs(batch), DapoObjective())
    for _ in range(2):
        report = trainer.update(batch, with_number(make_inputs(batch), "advantages", at(batch, 5, 3)), DapoObjective())
    folder = tmp_path / "faults" / "step-00012-update-3"
    assert f"faults/{folder.name}" in report.skipped
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-00012-update-2", "step-00012-update-3"]

    written = json.loads((folder / "report.json").read_text())
    assert written["cause"] in report.skipped and written["loss"] == "nan" and written["update"] == 3
    assert set(written["versions"]) >= {"dapo", "torch", "transformers"}
    assert set(written["norms"]) == set(trainer._parameters)
    assert written["layers"]["model.layers.0.mlp"] > 0
    first = written["samples"][0]
    assert (first["draw"], first["index"]) == (batch.draws[5], batch.indices[5])
    start = int(batch.lengths[:5].sum() + batch.prompt_lengths[5])
    assert first["response"] == decode(batch.token_ids[start : start + batch.response_lengths[5]].tolist())

    again = make_trainer()
    again.update(batch, make_inputs(batch), DapoObjective())
    old, inputs = read_fault(folder / "batch.safetensors")
    assert (
        again.update(old, TokenInputs(**inputs), DapoObjective()).skipped.split(";")[0] == report.skipped.split(";")[0]
    )


def test_dumps_are_bounded_in_number_and_size(trainer, batch, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "MAX_TOKENS", 30)
    monkeypatch.setattr(faults, "MAX_TEXTS", 1)
    bad = with_number(make_inputs(batch), "advantages", at(batch, 8, 0))  # the longest sample
    for step in range(12):
        trainer.begin_step(step)
        trainer._skipped_in_row = 0
        trainer.update(batch, bad, DapoObjective())
    kept = sorted(p.name for p in (tmp_path / "faults").iterdir())
    assert len(kept) == faults.MAX_FOLDERS == 10  # the first one, and the newest
    assert kept == [f"step-{n:05d}-update-1" for n in (1, *range(4, 13))]
    written = json.loads((tmp_path / "faults" / kept[0] / "report.json").read_text())
    assert written["samples_in_batch"] == batch.num_samples > written["samples_kept"] >= 1
    assert len(written["samples"]) == 1 and written["samples"][0]["draw"] == batch.draws[8]
    assert load_file(tmp_path / "faults" / kept[0] / "batch.safetensors")["batch/token_ids"].numel() <= 30


def test_a_disk_that_takes_nothing_ends_no_run(trainer, batch, tmp_path):
    (tmp_path / "faults").write_text("a file where the folder should be")
    said = trainer.update(batch, with_number(make_inputs(batch), "advantages", 0), DapoObjective()).skipped
    assert "could not be written to" in said and trainer.skipped_updates == 1


def test_a_resumed_step_goes_on_counting_its_updates(trainer, batch, tmp_path):
    bad = with_number(make_inputs(batch), "advantages", 0)
    trainer.begin_step(4)
    trainer.update(batch, make_inputs(batch), DapoObjective())
    trainer.save_state(tmp_path / "state")
    resumed = make_trainer()
    resumed.load_state(tmp_path / "state")
    resumed.faults = FaultFolder(tmp_path / "faults")
    resumed.begin_step(4)
    assert "step-00005-update-2" in resumed.update(batch, bad, DapoObjective()).skipped
    resumed.begin_step(5)
    assert "step-00006-update-1" in resumed.update(batch, bad, DapoObjective()).skipped
    written = json.loads((tmp_path / "faults/step-00006-update-1/report.json").read_text())
    assert "prompt" not in written["samples"][0]  # no tokenizer: ids only


# --- k in a row ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "cause", "advice"),
    [
        ("input", "whose advantages is not finite", "look at advantages of that sample in the dump"),
        ("layer", re.escape(LAYER), "lower training.learning_rate"),
        ("weights", "weights of .* not finite themselves", "mend model.path"),
    ],
)
def test_k_in_a_row_stop_with_cause_and_advice_failures_96(trainer, tmp_path, plant, cause, advice):
    batch = packed(lone_token(random_groups(SHAPE), draw=2, index=1))
    inputs = make_inputs(batch)
    if plant == "input":
        inputs = with_number(inputs, "advantages", 0)
    elif plant == "layer":
        plant_in_layer(trainer, math.inf)
    else:
        with torch.no_grad():
            next(trainer.policy.model.parameters()).fill_(math.nan)
    for _ in range(TrainingConfig().max_skipped_updates - 1):
        trainer.update(batch, inputs, DapoObjective())
    with pytest.raises(NumericalError, match=f"3 updates in a row .*{cause}.*What to try: .*{advice}"):
        trainer.update(batch, inputs, DapoObjective())
    assert len(list((tmp_path / "faults").iterdir())) == 3


# --- the engine ---------------------------------------------------------------------------------------------------


def engine_of(model):
    return NativeEngine(copy_model(model, torch.float32), [1], max_sequence_tokens=64, max_concurrent_samples=4)


async def generated(engine, requests):
    try:
        return [sample async for sample in engine.generate(requests)]
    finally:
        await engine.close()


def test_logits_that_are_not_finite_name_request_sample_and_token():
    """From the third decoding pass on the second of two rows is NaN."""
    engine = engine_of(load_model(random_model("qwen2")))
    passes = []

    def damage(_module, _given, out):
        passes.append(None)
        return torch.cat([out[:1], out[1:] * math.nan]) if len(passes) > 3 else out

    engine._decoder._runner.model.base_model.norm.register_forward_hook(damage)
    request = Request(7, (3, 4, 5), (11, 12), Sampling(max_tokens=8, temperature=1.0))
    with pytest.raises(EngineError, match="request 7, sample 1: the model's logits at response token 4 are not finite"):
        asyncio.run(generated(engine, [request]))


def test_top_k_leaves_finite_log_probabilities():
    """Truncation puts minus infinity into logits, which is no fault."""
    engine = engine_of(load_model(random_model("qwen2")))
    request = Request(1, (3, 4), (1, 2, 3), Sampling(max_tokens=6, temperature=1.0, top_k=2))
    samples = asyncio.run(generated(engine, [request]))
    assert len(samples) == 3 and all(np.isfinite(s.logprobs).all() for s in samples)


# --- in a run -----------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_faults_with_texts(tmp_path, monkeypatch):
    plain, count = Trainer.update, iter(range(9))

    def update(self, batch, inputs, objective):
        bad = with_number(inputs, "advantages", 0) if next(count) == 1 else inputs
        return plain(self, batch, bad, objective)

    monkeypatch.setattr(Trainer, "update", update)
    listener = Recorder()
    run(tmp_path / "run", {"training.steps": 2}, listener)
    folder = tmp_path / "run/faults/step-00001-update-2"
    assert [w for w in listener.warnings if "faults/step-00001-update-2" in w and "whose advantages is not finite" in w]
    first = json.loads((folder / "report.json").read_text())["samples"][0]
    assert first["prompt"] in {row["prompt"] for row in PROMPTS}


def test_no_checkpoint_is_made_of_weights_that_are_not_finite(tmp_path):
    model = tiny_model()

    def poison(step):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan

    changes = {"algorithm.filter_groups.enable": False, "training.steps": 4, "run.save_every": 1}
    with pytest.raises(NumericalError, match=r"weights of model\.layers\.1\.mlp\.down_proj\.weight are not finite"):
        run(tmp_path / "run", changes, Recorder(on_step=poison), model=model)
    assert len(steps_of(tmp_path / "run")) == 1  # and its checkpoint would have been the first one
    assert Checkpoints(RunFolder(tmp_path / "run").checkpoints).latest() is None
