"""A game behind OpenEnv's server, in a process of its own: python openenv_game.py PORT."""

import sys

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Seen(Observation):
    text: str


class Halving(Environment[Said, Seen, State]):
    """Three turns; each is paid for by how short what is said is. The first observation names the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.turns = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Seen(text=f"seed {seed}: say little")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        return Seen(text=f"turn {self.turns}", reward=1.0 / (1 + len(action.message)), done=self.turns == 3)

    @property
    def state(self):
        return State(step_count=self.turns)


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(Halving, Said, Seen, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
