"""Do the tests see faults? Each planted fault is put into a copy of the package, and the very tests of this folder
are run on the copy until one fails. A fault that no test sees, or that no longer fits the source, fails here.
"""

import importlib
import importlib.util
import inspect
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from algorithm_support import load_modules

import dapo.algorithm

SOURCE = Path(dapo.algorithm.__file__).parent
HERE = Path(__file__).parent

# (file, text as it stands, planted text)
MUTANTS = [
    # shaping
    ("shaping.py", "if excess <= 0:", "if excess < -1:"),
    ("shaping.py", "return -penalty_factor * excess / buffer_len", "return penalty_factor * excess / buffer_len"),
    ("shaping.py", "* excess / buffer_len", "* excess / max_response_length"),
    ("shaping.py", "if length > max_response_length:", "if length > max_response_length + 1:"),
    ("shaping.py", "return -penalty_factor\n", "return -1.0\n"),
    ("shaping.py", "(max_response_length - buffer_len)", "(max_response_length - buffer_len - 1)"),
    ("shaping.py", "buffer_len <= max_response_length:", "buffer_len:"),
    ("shaping.py", "reward += overlong_penalty(", "reward = overlong_penalty("),
    ("shaping.py", "if hard and sample.truncated:", "if hard and sample.length >= max_response_length:"),
    ("shaping.py", "in_loss=not (filter_truncated and sample.truncated)", "in_loss=not sample.truncated"),
    ("shaping.py", "shaped_reward=math.nan, in_loss=False", "shaped_reward=math.nan, in_loss=True"),
    ("shaping.py", "s.shaped_reward - coef *", "s.shaped_reward + coef *"),
    # advantage
    ("advantage.py", "correction=1", "correction=0"),
    ("advantage.py", "(rewards.std(correction=1) + epsilon)", "rewards.std(correction=1)"),
    ("advantage.py", "(rewards - rewards.mean()) / (", "(rewards.mean() - rewards) / ("),
    ("advantage.py", "(n / (n - 1))", "((n - 1) / n)"),
    ("advantage.py", "if _flat(values):", "if False:"),
    ("advantage.py", "bool(rewards.max() - rewards.min() <= FLAT_SPREAD * rewards.abs().max())", "False"),
    ("advantage.py", "<= FLAT_SPREAD", "< FLAT_SPREAD"),
    ("advantage.py", "2.0**-22", "2.0**-8"),
    ("advantage.py", "if len(rewards) < 2:", "if False:"),
    ("advantage.py", "[s.shaped_reward for s in group.scored]", "[s.verdict.value for s in group.scored]"),
    ("advantage.py", "advantage=0.0, in_loss=False", "advantage=0.0"),
    # admission
    ("admission.py", "if len(verdicts) < least:", "if len(verdicts) < 1:"),
    ("admission.py", "verdicts = [s.verdict for s in group.scored]", "verdicts = [s.reward for s in group.samples]"),
    ("admission.py", "> tolerance", ">= tolerance"),
    ("admission.py", "values = [v.value for v in verdicts]", "values = [s.shaped_reward for s in group.scored]"),
    ("admission.py", "bool(v.correct) for v", "v.value > 0 for v"),
    ("admission.py", "if 0 < right < len(verdicts):", "if 0 <= right < len(verdicts):"),
    ("admission.py", "Verdict.ALL_RIGHT if right", "Verdict.ALL_RIGHT if not right"),
    ("admission.py", "if any(v.correct is None for v in verdicts):", "if False:"),
    ("admission.py", "if place < pending]", "]"),
    ("admission.py", "tuple(kept[wanted:])", "()"),
    ("admission.py", "max(needed - in_flight, 0)", "max(needed, 0)"),
    ("admission.py", "math.ceil(wanted / keep_rate - 1e-9)", "math.floor(wanted / keep_rate)"),
    ("admission.py", "return budget_left\n", "return in_flight + budget_left\n"),
    # objective: the clip
    ("objective.py", "torch.maximum(-ratio", "torch.minimum(-ratio"),
    ("objective.py", "clamp(1 - low, 1 + high)", "clamp(1 - high, 1 + low)"),
    ("objective.py", "clamp(1 - low, 1 + high)", "clamp(1 - low, 1 + low)"),
    ("objective.py", "-ratio.clamp(1 - low, 1 + high) * advantages)", "-ratio * advantages)"),
    ("objective.py", "torch.where(advantages < 0, torch.min", "torch.where(advantages > 0, torch.min"),
    ("objective.py", "torch.where(advantages < 0, torch.minimum(loss, -c * advantages), loss)", "loss.clamp(max=c)"),
    ("objective.py", "torch.minimum(loss, -c * advantages)", "torch.maximum(loss, -c * advantages)"),
    ("objective.py", "return importance.detach() * loss", "return loss"),
    ("objective.py", "return importance.detach() * loss", "return importance * loss"),
    ("objective.py", "(logprobs - proximal).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)", "(logprobs - proximal)"),
    ("objective.py", "(logprobs - proximal).clamp", "(proximal - logprobs).clamp"),
    ("objective.py", "return logprobs, known.proximal_logprobs\n", "return logprobs, known.behaviour_logprobs\n"),
    # objective: masks and divisors
    ("objective.py", "return torch.where(mask, values, 0)", "return values * mask"),
    ("objective.py", "value.is_floating_point():", "value.is_floating_point() and field.name != 'weights':"),
    ("objective.py", "logprobs = _select(inputs.mask, logprobs)", "logprobs = logprobs"),
    ("objective.py", "(known.weights * loss).sum()", "(known.weights * loss).mean()"),
    ("objective.py", "(known.weights * loss).sum()", "(known.weights * loss).sum().detach()"),
    ("objective.py", "(known.weights * loss).sum()", "loss.sum() / inputs.mask.sum()"),
    ("objective.py", "1 / mask.sum().double()", "1 / torch.tensor(float(len(mask)))"),
    ("objective.py", "_mean_of_means(mask, group_ids)", "_mean_of_means(mask, sample_ids)"),
    ("objective.py", "torch.unique(sample_ids[mask])", "torch.unique(sample_ids)"),
    ("objective.py", "(tokens[unit] * (tokens > 0).sum())", "(tokens[unit] * len(tokens))"),
    ("objective.py", "(tokens[unit] * (tokens > 0).sum())", "tokens[unit]"),
    ("objective.py", "1 / (constant * num_samples)", "1 / constant"),
    ("objective.py", "1 / (constant * num_samples)", "1 / (constant * float(sample_ids.unique().numel()))"),
    ("objective.py", "torch.where(mask, weights, 0).float()", "(mask * weights).float()"),
    # objective: interpolation
    ("objective.py", "torch.lerp(behaviour, current, share)", "torch.lerp(current, behaviour, share)"),
    ("objective.py", "current = logprobs.detach()", "current = logprobs"),
    ("objective.py", "torch.where(now > 0, before / now.clamp(min=1), 1.0)", "before / now.clamp(min=1)"),
    ("objective.py", "mask=mask, **self.correction)", "mask=mask, **self.correction | {'kind': 'none'})"),
    # objective: KL, correction, statistics
    ("objective.py", "loss + self.kl_coef * kl", "loss - self.kl_coef * kl"),
    ("objective.py", "logprobs, known.reference_logprobs, self", "logprobs.detach(), known.reference_logprobs, self"),
    ("objective.py", "if self.kl_in_loss:", "if self.kl_coef:"),
    ("objective.py", " - _select(mask, behaviour.detach())", " + _select(mask, behaviour.detach())"),
    ("objective.py", "log_ratio = _select(mask, proximal.detach())", "log_ratio = proximal.detach()"),
    ("objective.py", "ratio.clamp(max=cap)", "ratio.clamp(min=cap)"),
    ("objective.py", "mask & (ratio >= low) & (ratio <= high)", "mask & (ratio > low) & (ratio < high)"),
    ("objective.py", "mask & (ratio >= low) & (ratio <= high)", "(ratio >= low) & (ratio <= high)"),
    ("objective.py", 'if level == "sequence":', "if False:"),
    ("objective.py", "(both | (advantages > 0)) & (ratio > 1", "(ratio > 1"),
    ("objective.py", "> 1 + self.clip_ratio_high", "> 1 + self.clip_ratio_low"),
    ("objective.py", "(ratio < 1 - self.clip_ratio_low)", "(ratio < 1 - self.clip_ratio_high)"),
    ("objective.py", "average(probability, clipped_up)", "average(probability * clipped_up, mask)"),
    ("objective.py", "known.proximal_logprobs, logprobs, ", "logprobs, known.proximal_logprobs, "),
    ("objective.py", "where.sum(dtype=torch.float64)", "torch.tensor(float(len(where)))"),
    # kin
    ("advantage.py", "(numbers - values.mean())", "(numbers - numbers.mean())"),
    ("advantage.py", "if _flat(values):\n        return torch.zeros_like(numbers)", "if False:\n        pass"),
    ("advantage.py", "if s.scored else s for s in g.samples))", "for s in g.samples))"),
    ("kin.py", "(total / tokens.clamp(min=1))", "total"),
    ("kin.py", "torch.where(known.mask, logprobs - known.proximal_logprobs, 0)", "logprobs - known.proximal_logprobs"),
    ("kin.py", "known)).detach()", "known))"),
    ("kin.py", "1 + self.clip_ratio_high)", "self.clip_ratio_high)"),
    ("kin.py", "known.importance.detach() * ", ""),
    ("kin.py", "clips_both_ways: ClassVar[bool] = True", "clips_both_ways: ClassVar[bool] = False"),
    # gae
    ("gae.py", "ends = lengths.cumsum(0) - 1\n    return", "ends = lengths.cumsum(0) - lengths\n    return"),
    ("gae.py", "-coef * kl.double()", "coef * kl.double()"),
    ("gae.py", "* goes_on[lengths > 0]", "* ~goes_on[lengths > 0]"),
    ("gae.py", "after[ends].double() * goes_on[lengths > 0]", "after[ends].double()"),
    ("gae.py", "values.double().roll(-1)", "values.double().roll(1)"),
    ("gae.py", "deltas[place] + gamma * lam * carried[rows]", "deltas[place] + lam * carried[rows]"),
    ("gae.py", "rewards.double() + gamma * after.double()", "rewards.double() + after.double()"),
    ("gae.py", "torch.maximum(plain", "torch.minimum(plain"),
    ("gae.py", "old + (values - old).clamp(-clip, clip) - returns", "(values - old).clamp(-clip, clip) - returns"),
    ("gae.py", "return plain / 2", "return plain"),
    ("gae.py", "torch.where(mask, values, inputs.old)", "values"),
    # kl
    ("kl.py", "d = logprobs - reference", "d = reference - logprobs"),
    ("kl.py", "d.square() / 2", "d.square()"),
    ("kl.py", "torch.expm1(-d) + d", "torch.expm1(-d) - d"),
    ("kl.py", "torch.expm1(-d) + d", "torch.exp(-d) + d"),
    ("kl.py", "torch.expm1(-d) + d", "torch.exp(-d) - 1 + d"),
    ("kl.py", "d = d.clamp(min=-_MAX_EXPONENT)", "d = d"),
    ("kl.py", "torch.where(mask, kl", "(lambda m, v, _: m * v)(mask, kl"),
    ("kl.py", "kl / self.target - 1, -0.2", "1 - kl / self.target, -0.2"),
    ("kl.py", "-0.2), 0.2)", "-0.2), 0.3)"),
    ("kl.py", "error * n / self.horizon", "error * self.horizon / n"),
    ("kl.py", "self.coef *= factor", "self.coef = factor"),
    ("kl.py", 'self.coef = float(state["coef"])', "pass"),
]  # fmt: skip


def load_tests():
    """Every other test of this folder, as functions of the modules under test; worked values before properties."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        if path == Path(__file__):
            continue
        spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [(path.stem, f) for name, f in vars(module).items() if name.startswith("test_")]
    return sorted(found, key=lambda item: hasattr(item[1], "hypothesis"))


@pytest.fixture(scope="module")
def tests():
    return load_tests()


def failing(tests, algo, first):
    """The name of a test that fails on ``algo``, or None. Those on module ``first`` are tried first."""
    for _, test in sorted(tests, key=lambda item: item[0] != f"test_{first}"):
        try:
            test(algo=algo)
        except (Exception, pytest.fail.Exception):
            return test.__name__
    return None


def load_copy(folder: Path, name: str, file: str = "", old: str = "", new: str = "") -> SimpleNamespace:
    """A copy of the package under another name, with one text replaced."""
    shutil.copytree(SOURCE, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if file:
        text = (folder / name / file).read_text()
        assert old in text, f"{file} no longer holds {old!r}: mend the mutant"
        (folder / name / file).write_text(text.replace(old, new))
    for path in (folder / name).glob("*.py"):
        path.write_text(path.read_text().replace("dapo.algorithm", name))
    return load_modules(name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("dapo_mutant")]:
        del sys.modules[name]


def test_unharmed_copy_passes(folder, tests):
    assert len(tests) > 50
    assert all("algo" in inspect.signature(test).parameters for _, test in tests)
    assert failing(tests, load_copy(folder, "dapo_mutant"), "") is None


def test_stale_mutant_is_noticed(folder):
    with pytest.raises(AssertionError, match="mend the mutant"):
        load_copy(folder, "dapo_mutant", "kl.py", "no such text", "")


@pytest.mark.filterwarnings("ignore")  # broken code may well be warned of
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda n: f"{MUTANTS[n][0][:-3]}-{n}")
def test_mutant_is_killed(folder, tests, number):
    file, old, new = MUTANTS[number]
    algo = load_copy(folder, f"dapo_mutant_{number}", file, old, new)
    assert failing(tests, algo, file[:-3]) is not None, f"no test sees {old!r} -> {new!r} in {file}"
