"""The configuration of a run: one tree, read from YAML, checked as a whole before anything is loaded.

Unknown keys are refused with the nearest valid one named; impossible combinations are refused with the numbers shown
and a working value proposed. Defaults are the paper's (arXiv 2503.14476) and, where it is silent, its released code's.
Names of sizes say what they count: prompts, samples, groups or tokens."""

from dapo.config.algorithm import AlgorithmConfig
from dapo.config.composed_reward import ComposeReward, MonitorConfig, RewardConfig
from dapo.config.data import DataConfig
from dapo.config.messages import all_keys
from dapo.config.reading import build_config, flat, load_config, load_reward, load_yaml, nested
from dapo.config.reward import (
    CodeReward,
    ExactReward,
    FunctionReward,
    HttpReward,
    JudgeReward,
    KServeReward,
    MathReward,
    ModelReward,
    ServerReward,
)
from dapo.config.sections import EvaluationConfig, TrainingConfig
from dapo.config.tree import Config, warnings_for

__all__ = ["AlgorithmConfig", "CodeReward", "ComposeReward", "Config", "DataConfig", "EvaluationConfig", "ExactReward"]
__all__ += ["FunctionReward", "HttpReward", "JudgeReward", "KServeReward", "MathReward", "ModelReward", "MonitorConfig"]
__all__ += ["RewardConfig", "ServerReward", "TrainingConfig", "all_keys", "build_config", "flat", "load_config"]
__all__ += ["load_reward", "load_yaml", "nested", "warnings_for"]
