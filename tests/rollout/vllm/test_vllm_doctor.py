"""What `dapo doctor` and a run ask of the installed vLLM before the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo.checks.context import CheckContext, Finding
from dapo.checks.model import check_engine
from dapo.config import build_config, nested
from dapo.errors import ConfigError
from run_cases import SETTINGS, run, tiny_model

VLLM = {"rollout.engine": "vllm", "runtime.deterministic": False}


def told(**changes: Any) -> Finding:
    model = tiny_model()
    model.config.architectures = [type(model).__name__]
    config = build_config(nested(SETTINGS | VLLM | changes))
    (found,) = check_engine(CheckContext(config, model_config=model.config, shape=model))
    return found


def test_the_doctor_names_the_version_that_is_installed() -> None:
    import vllm

    assert told().found.startswith(f"vLLM {vllm.__version__} covers Qwen2ForCausalLM; native covers")


WRONG = [
    ({"rollout.engine_args": {"bogus": 1}}, "engine_args.bogus: vllm has no such argument"),
    ({"rollout.engine_args": {"seed": 1}}, "engine_args.seed: is set by the run"),
    ({"runtime.sync": "nccl"}, "runtime.sync: nccl needs learner and engine on different GPUs"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_what_does_not_go_with_vllm_is_told_before_the_model_loads(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("dapo.orchestrator.build.load_trainable", lambda *args: pytest.fail("the model was loaded"))
    found = told(**changes)
    assert found.status == "fail" and said in found.found
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", VLLM | changes)
