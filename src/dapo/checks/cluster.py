"""Whether a cluster has what a recipe asks for."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator

from dapo.checks.context import CheckContext, Finding
from dapo.config.placement import bundles, shortages, told_of
from dapo.errors import extra, first_line

CONNECT_SECONDS = 10.0
IF_NO_ANSWER = "ray start --head; if it is there, it may ask for a token: RAY_AUTH_MODE=token (docs/operations.md)"


def check_cluster(context: CheckContext) -> Iterator[Finding]:
    config = context.config
    if config.runtime.kind != "ray":
        return
    with extra("ray", "runtime.kind=ray"):
        import ray
    address, here, joined = config.runtime.address, "this machine", ray.is_initialized()
    if address is None:
        nodes = [_this_machine()]
    else:
        here = f"the Ray cluster at {address}"
        try:
            require_answer(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False, ignore_reinit_error=True)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except Exception as error:
            yield Finding("machine", "cluster", "fail", f"{here} does not answer: {first_line(error)}", IF_NO_ANSWER)
            return
        finally:
            if not joined:  # whoever had joined it stays
                ray.shutdown()
    wanted = bundles(config, any(node.get("GPU") for node in nodes))
    cpus = sum(bundle.cpus for bundle in wanted)
    told = told_of(nodes)
    if address is None and cpus > nodes[0]["CPU"]:  # the run starts Ray with as many
        text = f"{cpus:g} CPUs are asked for, and this machine has {nodes[0]['CPU']:g}, which its workers share"
        yield Finding("machine", "cluster", "warn", text, "fewer runtime.*.workers, if it is slow")
        nodes[0]["CPU"] = cpus
    short = list(shortages(wanted, nodes))
    for line in short:
        what, _, fix = line.partition("; ")
        yield Finding("machine", "cluster", "fail", f"{here}: {what}", fix)
    if not short:
        counts = Counter(bundle.role for bundle in wanted).items()
        workers = ", ".join(f"{count} {role} worker{'s' * (count > 1)}" for role, count in counts)
        yield Finding("machine", "cluster", "pass", f"{here}: {told}, for {workers}")


def require_answer(address: str) -> None:
    """Ray itself would try for minutes. Raises OSError: nothing answers at HOST:PORT."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _this_machine() -> dict[str, float]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count()), "memory": float(memory)}
