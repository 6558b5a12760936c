"""Files for Slurm, Kubernetes and containers: they parse, and name what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dapo.config import load_config

ROOT = Path(__file__).parents[1]
KNOWN = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENV", "ENTRYPOINT", "CMD"}
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def test_the_slurm_script_is_one() -> None:
    script = ROOT / "deploy" / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", script.read_text("utf-8"), re.MULTILINE)[1] == "300"  # type: ignore[index]
    assert load_config("cpu-demo").run.stop_within_s < 300


def test_the_ray_job_of_kubernetes_asks_for_the_gpus_of_its_recipe() -> None:
    job = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text("utf-8"))
    command = job["spec"]["entrypoint"].split()
    config = load_config(ROOT / "recipes" / "cluster" / Path(command[2]).name, command[3:])
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert config.runtime.learner.workers == group["replicas"] * gpus and config.runtime.address == "auto"
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert head["terminationGracePeriodSeconds"] > config.run.stop_within_s


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_container_has_extras_that_exist(file: Path) -> None:
    text = file.read_text("utf-8")
    extras = set(re.search(r"\)\[([a-z,]+)\]", text)[1].split(","))  # type: ignore[index]
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert extras <= set(known) and {"ray", "resources"} <= extras
    instructions = re.findall(r"^([A-Z]+) ", text, re.MULTILINE)
    assert instructions[0] == "FROM" and set(instructions) <= {
        "FROM",
        "RUN",
        "COPY",
        "USER",
        "WORKDIR",
        "ENV",
        "ENTRYPOINT",
        "CMD",
    }
    assert f"docker build -f docker/{file.name}" in text
