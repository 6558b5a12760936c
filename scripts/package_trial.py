"""What scripts/package does in an environment that holds the wheel and no more: a training from Python, in seconds.

With the argument ``extras``: the extras that a user may install, one a line.
"""

import sys
from importlib.metadata import metadata


def train_a_step() -> None:
    """One rollout step with a model of random weights, and one held-out evaluation."""
    from dapo import train
    from dapo.commands.demo.task import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    prompts = [{"prompt": f"{a}*3+{b}-1=", "answer": str((a * 3 + b - 1) % 10)} for a in range(10) for b in range(10)]

    def reward(response: str) -> float:
        return float(len(response))

    settings = {
        "training.steps": 1,
        "training.warmup_steps": 0,
        "rollout.prompts_per_step": 4,
        "rollout.max_response_length": 16,
        "algorithm.overlong_buffer.len": 4,
        "algorithm.filter_groups.metric": "score",
        "run.dir": "run",
    }
    model = make_model(0, len(tokenizer))
    result = train(model, prompts, reward, settings, tokenizer=tokenizer, heldout=prompts[:8])
    if [line["step"] for line in result.metrics] != [1] or not (result.model_path / "model.safetensors").is_file():
        raise SystemExit(f"unexpected result: {result}")


if __name__ == "__main__":
    if sys.argv[1:] == ["extras"]:
        extras = metadata("dapo-rl").get_all("Provides-Extra") or []
        print("\n".join(extra for extra in extras if extra not in ("dev", "parity")))
    else:
        train_a_step()
