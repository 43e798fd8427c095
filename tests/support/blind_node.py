"""A node of this machine that does not see one of its directories, as another machine does not."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_ports
from tests.support.processes import next_line

# `ray start`, which would take the loopback address, that a cluster has after a local study in this process, for the network's. And with a
# folder of its own for the code that drivers ship, as a machine has: nodes that share one take it from under each other's processes.
RAY_START = """
import functools, uuid
import ray._private.parameter as parameter
import ray._private.services as services
services.resolve_ip_for_localhost = lambda host: host
parameter.RayParams = functools.partial(parameter.RayParams, runtime_env_dir_name=f"node-{uuid.uuid4().hex[:8]}")
from ray.scripts.scripts import main
main()
"""


@contextmanager
def blind_node(address: str, hidden: Path) -> Iterator[None]:
    """Add a node of this machine that sees another disk where the hidden directory is."""
    host, (agent,) = address.rpartition(":")[0], free_ports(1)
    own = f"--node-ip-address={host} --dashboard-agent-listen-port={agent}"
    ray = f"{shlex.join([sys.executable, '-c', RAY_START])} start --address={address} {own} --num-cpus=1 --disable-usage-stats --block"
    script = f"mount -t tmpfs blind {shlex.quote(str(hidden))} && exec {ray}"
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    environment = os.environ | {"RAY_worker_niceness": "0"}  # else whatever runs beside the test comes before its ranks
    process = subprocess.Popen(isolated, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    said = ""
    try:
        while "Ray runtime started" not in said:
            line = next_line(process)
            assert line, said
            said += line
        yield
    finally:
        process.kill()
        process.communicate()


def why_there_is_no_blind_node() -> str | None:
    if os.getuid() != 0:
        return "mount namespaces are made by root alone"
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no mount namespaces here: {tried.stderr.strip()}"
