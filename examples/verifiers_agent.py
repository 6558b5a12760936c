"""A taskset of `verifiers` as an agent. It pins another `openai`, so it has a Python of its own. Tried with 0.4.

    python -m venv verifiers-env && verifiers-env/bin/pip install 'verifiers>=0.4,<0.5' uv  # and the taskset's package
    export VERIFIERS_PYTHON=verifiers-env/bin/python VERIFIERS_ENV='{"taskset": {"id": "gsm8k_v1"}}'
    $VERIFIERS_PYTHON examples/verifiers_agent.py 1000 > tasks.jsonl
    dapo train RECIPE data.train=tasks.jsonl environment.agent=examples/verifiers_agent.py:play

VERIFIERS_ENV is the configuration of its `Env`. By default the harness is `null`, which talks and calls the taskset's
tools, as a process of this machine; uv installs what it needs at the first episode. One process of verifiers plays all
episodes of a worker, one after the other.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path


def play(base_url, row):
    """Called by the run."""
    process = playing()
    process.stdin.write(json.dumps({"base_url": base_url, "task": row["task"]}) + "\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        playing.cache_clear()
        raise RuntimeError(f"verifiers ended with {process.wait()}; its output is above")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["reward"]


@cache
def playing():
    python = Path(os.environ["VERIFIERS_PYTHON"]).absolute()
    paths = {"PATH": f"{python.parent}:{os.environ['PATH']}"}  # uv is there
    command = [python, __file__]
    return subprocess.Popen(command, env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def environment():
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    here = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    return load_environment(resolve_env_config(here | json.loads(os.environ["VERIFIERS_ENV"])))


async def serve(tell):
    """Play what is asked for, line by line, with the taskset's own rewards."""
    import verifiers.v1 as vf

    played = environment()
    tasks = {}
    async with played.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            index = asked["task"]
            if index not in tasks:
                tasks |= {task.data.idx: task for task in itertools.islice(played.taskset, index + 1)}
            client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var="NONE")
            model = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
            episode = await played.run_episode(tasks[index], model)
            errors = [error.message for one in (episode, *episode.traces) for error in one.errors]
            reward = sum(trace.reward for trace in episode.traces)
            tell({"reward": reward} if episode.ok else {"error": "; ".join(errors)})


if __name__ == "__main__":
    if sys.argv[1:]:
        for task in itertools.islice(environment().taskset, int(sys.argv[1])):
            print(json.dumps({"prompt": str(task.data.prompt), "task": task.data.idx}))
    else:
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # what others print is no answer
            asyncio.run(serve(lambda answer: print(json.dumps(answer), file=out, flush=True)))
