"""A taskset of verifiers: paid for an answer in few letters."""

import verifiers.v1 as vf

__all__ = ["Short"]


class Toolbox(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "words"

    @vf.tool
    def count(self, text: str) -> int:
        """Count the letters of a text."""
        return len(text)


class Data(vf.TaskData):
    most: int


class Task(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Toolbox(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + len(trace.last_reply) / self.data.most)


class Short(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt=f"In {most} letters.", most=most), self.config.task) for most in (1, 2, 3)]


if __name__ == "__main__":
    Toolbox.run()
