"""An environment behind OpenEnv (0.3): what the model says is its action, what it observes is the reply.

    pip install openenv-core
    OPENENV_URL=http://127.0.0.1:8000 dapo train RECIPE environment.name=examples/openenv_server.py:OpenEnv

The action is {OPENENV_ACTION: what the model says}, by default `message`. Rewards are by turn, see environment.credit.
"""

import json
import os

from openenv.core.generic_client import GenericEnvClient

from dapo.environments import Reply


class OpenEnv:
    def reset(self, **row):
        self.client = GenericEnvClient(base_url=os.environ["OPENENV_URL"]).sync()
        return "\n" + shown(self.client.reset().observation)

    def reply(self, text):
        result = self.client.step({os.environ.get("OPENENV_ACTION", "message"): text})
        return Reply(shown(result.observation), reward=float(result.reward or 0.0), done=bool(result.done))

    def reward(self):
        self.client.close()
        return 0.0  # the rewards of the turns are all there is


def shown(observation):
    """The observation as text."""
    texts = [observation[key] for key in ("text", "message", "echoed_message") if observation.get(key)]
    return str(texts[0]) if texts else json.dumps(observation)
