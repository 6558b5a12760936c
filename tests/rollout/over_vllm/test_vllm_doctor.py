"""What `dapo doctor` asks of the vLLM that is installed."""

from __future__ import annotations

from typing import Any

import pytest

from dapo.checks.context import CheckContext, Finding
from dapo.checks.model import check_engine
from dapo.config import build_config, nested
from run_cases import SETTINGS, tiny_model

pytestmark = pytest.mark.vllm
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


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rollout.engine_args": {"bogus": 1}}, "engine_args.bogus: vllm has no such argument"),
    ({"rollout.engine_args": {"seed": 1}}, "engine_args.seed: is set by the run"),
    ({"runtime.sync": "nccl"}, "runtime.sync: nccl is for GPUs"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_what_does_not_go_with_vllm_is_told(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = told(**changes)
    assert found.status == "fail" and said in found.found
