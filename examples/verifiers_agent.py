"""An environment of `verifiers` as an agent. It pins another `openai`, so it lives in an environment of its own:

    python -m venv verifiers-env && verifiers-env/bin/pip install 'verifiers<0.2'  # and the environment
    export VERIFIERS_PYTHON=verifiers-env/bin/python VERIFIERS_ENV=gsm8k
    dapo train RECIPE environment.agent=examples/verifiers_agent.py:play

For versions with `load_environment` and `Environment.rollout` (before 0.2; 0.4 has others). Not tried against one.
"""

import json
import os
import subprocess

INSIDE = """
import asyncio, inspect, json, sys
import verifiers
from openai import AsyncOpenAI

async def main(base_url, row):
    environment = verifiers.load_environment(row["environment"])
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    given = {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"] or "", "example_id": 0}
    completion, state = await environment.rollout(client, "policy", **given)
    found = environment.rubric.score_rollout(completion=completion, state=state, **given)
    return await found if inspect.isawaitable(found) else found

score = asyncio.run(main(sys.argv[1], json.loads(sys.stdin.read())))
print(json.dumps(float(getattr(score, "reward", score))))
"""


def play(base_url, row):
    given = json.dumps({**row, "environment": os.environ["VERIFIERS_ENV"]}, default=str)
    command = [os.environ["VERIFIERS_PYTHON"], "-c", INSIDE, base_url]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return json.loads(done.stdout.splitlines()[-1])
