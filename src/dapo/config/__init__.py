"""The configuration of a run: one tree, read from YAML, checked as a whole before anything is loaded.

Unknown keys are refused with the nearest valid one named; impossible combinations are refused with the numbers shown
and a working value proposed. Defaults are the paper's (arXiv 2503.14476) and, where it is silent, its released code's.
Names of sizes say what they count: prompts, samples, groups or tokens.
"""

from dapo.config.checks import warnings_for
from dapo.config.messages import all_keys
from dapo.config.reading import build_config, flat, load_config, load_reward, load_yaml, nested
from dapo.config.reward import (
    CodeReward,
    ComposeReward,
    ExactReward,
    FunctionReward,
    HttpReward,
    JudgeReward,
    KServeReward,
    MathReward,
    ModelReward,
    MonitorConfig,
    RewardConfig,
    ServerReward,
)
from dapo.config.section import _section_types
from dapo.config.sections import (
    AlgorithmConfig,
    DataConfig,
    EvaluationConfig,
    TrainingConfig,
)
from dapo.config.tree import Config

__all__ = [
    "AlgorithmConfig",
    "CodeReward",
    "ComposeReward",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "ExactReward",
    "FunctionReward",
    "HttpReward",
    "JudgeReward",
    "KServeReward",
    "MathReward",
    "ModelReward",
    "MonitorConfig",
    "RewardConfig",
    "ServerReward",
    "TrainingConfig",
    "_section_types",
    "all_keys",
    "build_config",
    "flat",
    "load_config",
    "load_reward",
    "load_yaml",
    "nested",
    "warnings_for",
]
