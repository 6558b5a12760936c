"""The trees of the stages around reinforcement learning: fine-tuning, preferences, reward models.

They are the tree of a run with the sections that a stage has. ``stage`` says which one it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from yaml import YAMLError

from dapo.config.common import HeldOutConfig, OptimizerConfig
from dapo.config.data import Files, WritingConfig
from dapo.config.messages import build_tree
from dapo.config.plan import existing_recipe, name_run_folder
from dapo.config.reading import file_beside, items_beside, load_yaml, read_recipe, with_values
from dapo.config.runtime import RuntimeConfig
from dapo.config.section import Section
from dapo.config.sections import ModelConfig, RunConfig
from dapo.errors import ConfigError
from dapo.util.files import read_text


class StageTraining(OptimizerConfig):
    steps: int | None = Field(None, ge=0)
    """Updates. null: as many as `epochs` need."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the rows, in place of `steps`. Both null: one."""
    rows_per_update: int = Field(32, ge=1)
    """Rows in one optimizer mini-batch: demonstrations, pairs, rankings or labelled texts."""
    learning_rate: float = Field(1e-5, gt=0)
    """AdamW, after the warm-up."""

    def problems(self) -> Iterator[str]:
        if self.steps is not None and self.epochs is not None:
            yield f"epochs: is {self.epochs:g}, and steps is {self.steps}; give one of the two"


class StageData(Section):
    train: Files = Field(default_factory=list)
    """Rows to train on: files (JSON lines, JSON arrays, Parquet, .gz, .zst), folders of saved data sets, or names on
    the hub; written as in the recipe of a run."""
    rows: int | None = Field(None, ge=1)
    """Use the first so many rows of them, or of each where they have weights; by default all."""
    prompt_key: str = "prompt"
    """Key of the prompt: text, or a list of chat messages. Dots lead into mappings."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A row that cannot be used: stop and name it, or go on without it and count it."""
    max_bad_rows: float = Field(0.01, ge=0, le=1)
    """Share of bad rows above which `skip` stops too."""
    max_length: int = Field(2048, ge=2)
    """Longest prompt and response together, in tokens. Rows with a longer one are left out and counted: a text that is
    cut has another end."""
    shuffle: bool = True
    """Draw rows in a seeded random order, another one each epoch."""


class SFTData(StageData, WritingConfig):
    response_key: str = "response"
    """Key of the response to imitate: text."""
    messages_key: str = "messages"
    """Key of a whole conversation, in place of prompt and response. All messages of the assistant are imitated."""


class PairKeys(StageData):
    chosen_key: str = "chosen"
    """Key of the better response: text, or chat messages that end with it."""
    rejected_key: str = "rejected"
    """Key of the worse response, likewise. What comes before the two must be the same."""
    responses_key: str = "responses"
    """Key of K ranked responses, the best one first, in place of a pair: all pairs of them count."""
    scores_key: str = "scores"
    """Key of numbers that rank these responses instead, the higher the better; of equal ones none is the better one."""


class DPOData(PairKeys, WritingConfig):
    pass


class RewardModelData(PairKeys):
    margin_key: str = "margin"
    """Key of a number that the better response of a row has to be ahead by; without it 0."""
    response_key: str = "response"
    """Key of the labelled text, with or without a prompt (`loss: outcome`)."""
    label_key: str = "label"
    """Key of its label: true or false, or 1 or 0."""


class DPOSection(Section):
    loss: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    """DPO; IPO, which aims at a margin in place of one as large as can be; or SimPO, which has no reference policy."""
    beta: float = Field(0.1, gt=0)
    """How closely the policy is held to the reference; with SimPO the scale of the difference (2 to 2.5 there)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs taken to be labelled the wrong way round (loss `sigmoid`)."""
    gamma: float = Field(0.0, ge=0)
    """Margin of SimPO, such as 1.0."""
    nll: float = Field(0.0, ge=0)
    """Weight of the NLL of the chosen responses on top of the loss: it keeps their probability from falling."""

    def problems(self) -> Iterator[str]:
        for key, loss in (("label_smoothing", "sigmoid"), ("gamma", "simpo")):
            if getattr(self, key) and self.loss != loss:
                yield f"{key}: is for loss={loss}, and loss is {self.loss}; leave it out"


class RewardModelSection(Section):
    loss: Literal["preference", "outcome"] = "preference"
    """What the rows hold: pairs or rankings (Bradley-Terry), or texts with labels (binary cross-entropy)."""
    template: Literal["chat", "plain"] = "chat"
    """How prompt and response become one text, as in `reward: {kind: model}`: by the tokenizer's chat template, or one
    right after the other."""
    centring: float = Field(0.0, ge=0)
    """c of c (r_w + r_l)^2, such as 0.01, which keeps scores around 0 (loss `preference`)."""


class StageConfig(Section):
    stage: str
    """Which stage this is."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random follows from it."""
    model: ModelConfig
    evaluation: HeldOutConfig = HeldOutConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    run: RunConfig = RunConfig()
    training: StageTraining = StageTraining()
    data: Any = None

    def problems(self) -> Iterator[str]:
        budget, longest = self.training.tokens_per_micro_batch, self.data.max_length
        if budget < longest:
            yield (
                f"training.tokens_per_micro_batch: is {budget}, but a row may have {longest} tokens "
                f"(data.max_length); use at least {longest}"
            )
        if self.runtime.kind != "local":
            yield f"runtime.kind: is {self.runtime.kind}, but a stage runs in one process; use local"
        if self.runtime.exact:
            yield "runtime.exact: is for what is sampled, and a stage samples nothing; leave it out"


class SFTConfig(StageConfig):
    stage: Literal["sft"] = "sft"
    """Which stage this is."""
    data: SFTData = SFTData()


class DPOTraining(StageTraining):
    learning_rate: float = Field(1e-6, gt=0)
    """AdamW, after the warm-up."""


class DPOConfig(StageConfig):
    stage: Literal["dpo"] = "dpo"
    """Which stage this is."""
    data: DPOData = DPOData()
    training: DPOTraining = DPOTraining()
    dpo: DPOSection = DPOSection()


class RewardModelConfig(StageConfig):
    stage: Literal["reward_model"] = "reward_model"
    """Which stage this is."""
    data: RewardModelData = RewardModelData()
    reward_model: RewardModelSection = RewardModelSection()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.reward_model.centring and self.reward_model.loss != "preference":
            yield "reward_model.centring: is for loss=preference, and loss is outcome; leave it out"


STAGES: Mapping[str, type[StageConfig]] = {"sft": SFTConfig, "dpo": DPOConfig, "reward_model": RewardModelConfig}


def load_stage(stage: str, recipe: str | Path, overrides: Sequence[str] = ()) -> StageConfig:
    """Read the recipe of a stage and apply ``section.key=value``, as :func:`dapo.config.load_config` does for a run.
    Raises ConfigError: with every problem found, each with file, line and key."""
    path = existing_recipe(recipe)
    tree, where = read_recipe(path, overrides)
    name_run_folder(tree, path)
    return beside(build_stage(stage, tree, str(path), where), path.parent)


def stage_named(recipe: Path) -> str | None:
    """The stage that a recipe is of; None: it is of none, or cannot be read."""
    try:
        tree = load_yaml(read_text(recipe))
    except (OSError, ValueError, YAMLError):
        return None
    return next((name for name in STAGES if isinstance(tree, dict) and tree.get("stage") == name), None)


def build_stage(
    stage: str, tree: Mapping[str, Any], source: str = "settings", where: Mapping[str, str] | None = None
) -> StageConfig:
    """Check a nested mapping. Raises ConfigError: it is the tree of another stage, or with every problem found."""
    said = tree.get("stage", stage)
    if said != stage:
        command = f"dapo {str(said).replace('_', '-')}" if said in STAGES else f"one of {', '.join(STAGES)}"
        raise ConfigError(f"{source}: stage: is {said}, and this is {stage}; what would work: {command}")
    return build_tree(STAGES[stage], {**tree, "stage": stage}, source, where)


def beside(config: StageConfig, folder: Path) -> StageConfig:
    """Files that lie beside the recipe, in ``folder``."""
    data: Any = config.data
    values: dict[str, Any] = {"data.train": items_beside(data.train, folder)}
    values["evaluation.data"] = items_beside(config.evaluation.data, folder)
    if getattr(data, "chat_template", None):
        values["data.chat_template"] = file_beside(data.chat_template, folder)
    return with_values(config, values)
