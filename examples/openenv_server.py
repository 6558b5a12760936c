"""An environment behind OpenEnv: what the model says is its action, what it observes is the reply. Tried with 0.10.

    pip install openenv
    OPENENV_URL=http://127.0.0.1:8000 dapo train RECIPE environment.name=examples/openenv_server.py:OpenEnv \
        algorithm.filter_groups.metric=score

A row's `reset` is what the server's `reset` gets, such as {"seed": 3} or {"split": "train", "index": 12}: the episodes
of a group are about the same task only if it names one. The action is {OPENENV_ACTION: what the model says}, by default
`message`. Rewards are by turn, see environment.credit. The server needs `max_concurrent_envs` of environment.workers.
"""

import json
import os

from openenv.core.generic_client import GenericEnvClient

from dapo.environments import Reply


class OpenEnv:
    def reset(self, reset=None, **row):
        self.client = GenericEnvClient(base_url=os.environ["OPENENV_URL"]).sync()
        return "\n" + shown(self.client.reset(**(reset or {})).observation)

    def reply(self, text):
        result = self.client.step({os.environ.get("OPENENV_ACTION", "message"): text})
        return Reply(shown(result.observation), reward=float(result.reward or 0.0), done=bool(result.done))

    def reward(self):
        self.client.close()
        return 0.0  # the rewards of the turns are all there is


def shown(observation):
    """The observation as text."""
    texts = [observation[key] for key in ("text", "message", "prompt", "output") if observation.get(key)]
    return str(texts[0]) if texts else json.dumps(observation)
