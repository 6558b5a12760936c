"""The section that says where a run computes: in one process, or in those that Ray places."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapo.config.section import Section


class RoleConfig(Section):
    workers: int = Field(1, ge=1, le=4096)
    """Processes of this role."""
    cpus: float = Field(1.0, ge=0.01)
    """Cores of each, which are its threads for tensor work, too."""
    gpus: float | None = Field(None, ge=0)
    """GPUs of each, or a part of one. null: one (of vLLM rollout.tensor_parallel) if the cluster has GPUs."""
    memory_gib: float | None = Field(None, gt=0)
    """Main memory that a node must have for each. null: any."""


class LearnerRole(RoleConfig):
    sharded: bool | None = None
    """Each worker holds its part of the model (FSDP2), or all of it (`false`), which may be faster for small models.
    null: sharded, but for one worker and for LoRA."""
    cpu_offload: bool = False
    """Keep parameters, gradients and moments of a sharded model in main memory."""


class RewardRole(RoleConfig):
    workers: int = Field(0, ge=0, le=4096)
    """Processes that score, with a scorer each. 0: scores are made where the run was started."""
    gpus: float | None = Field(None, ge=0)
    """GPUs of each, or a part of one. null: none, but one for a reward model if the cluster has GPUs and
    `reward.device` is not cpu."""


class RuntimeConfig(Section):
    kind: Literal["local", "ray"] = "local"
    """Placement: one process; or the workers of learner, engine and reward in processes of their own, on this machine
    or a cluster (`ray`, needs `dapo-rl[ray]`)."""
    address: str | None = Field(None, pattern=r"^(auto|[^:/\s]+:\d+)$")
    """Of a Ray cluster: `auto` on one of its nodes, or HOST:PORT. null: one that is started on this machine, for the
    run."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Each learner worker has an engine in its process, and they take turns; or learner and engines are apart."""
    learner: LearnerRole = LearnerRole()
    """Workers that train (kind=ray)."""
    engine: RoleConfig = RoleConfig()
    """Workers that sample (placement=disaggregated), each with an engine of its own."""
    reward: RewardRole = RewardRole()
    """Workers that score (kind=ray)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of engine and trainer: one GPU, or the CPU. auto: a GPU, if PyTorch finds one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Threads for tensor work; by default 1 for small models (whose operations are too short to share) and all cores
    for others."""
    deterministic: bool = False
    """Pin every shape, so that the same seed gives the same bits."""
    exact: bool = False
    """The engine's log-probabilities equal the trainer's to the bit (`mismatch/*` is 0). Native engine and kind=local;
    slower."""
    sync: Literal["auto", "copy", "ipc", "nccl", "files", "group", "objects"] = "auto"
    """How new weights get to the engine: `copy` in one process (`native`), and to vLLM by `ipc` on the same GPU, `nccl`
    to others, or `files` in memory; to engines that Ray placed apart by a `group` of processes (NCCL between GPUs, gloo
    otherwise), or by `objects`, through Ray's object store. `auto`: what the placement allows; of these two `group`
    between GPUs, else `objects`."""
