"""A laptop, a head and workers, machines in namespaces with real sshds: what `ray up` needs where the machines are there."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batchscout.orchestrator.study.events import Event
from batchscout.orchestrator.study.lines import read_lines
from tests.support.cluster_file import cluster_yaml, local_variant
from tests.support.machines import CLONE, HOME, Machine, listens_for_ssh, machines
from tests.support.processes import until

KEY = HOME / ".ssh/id_ed25519"
ON_THE_LAPTOP, ON_THE_HEAD = HOME / "clone", HOME / "batchscout"
LANES = HOME / "lanes"


@dataclass(frozen=True)
class Site:
    laptop: Machine
    head: Machine
    workers: list[Machine]
    runs: Path
    """The run directories, on storage that the head, the workers and this machine see."""

    def ray(self, *command: str, code: int = 0) -> str:
        return self.laptop.run("ray", *command, code=code, folder=ON_THE_LAPTOP)

    def batchscout(self, *arguments: str, code: int = 0) -> str:
        return self.laptop.run(sys.executable, "-m", "batchscout", *arguments, code=code, folder=ON_THE_LAPTOP)

    def journal(self, study: str) -> Path:
        return self.runs / study / "journal.jsonl"

    def switched_on(self, machine: Machine) -> contextlib.AbstractContextManager[None]:
        return listens_for_ssh(machine, self.laptop.run("cat", f"{KEY}.pub"))

    def write_study(self, study: dict[str, Any]) -> None:
        self.laptop.write(ON_THE_LAPTOP / f"mine/{study['name']}.yaml", yaml.safe_dump(study))

    def submit(self, study: str, num_nodes: int) -> tuple[str, ...]:
        path = f"mine/{study}.yaml"
        return ("ray", "submit", "cluster.yaml", "configs/submit.py", path, "--min-nodes", str(num_nodes))

    @contextlib.contextmanager
    def submitted(self, study: str, num_nodes: int) -> Iterator[subprocess.Popen[str]]:
        """`ray submit`, which is waited for by who has it."""
        command = self.laptop.command(self.submit(study, num_nodes), ON_THE_LAPTOP)
        told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, **told) as process:
            try:
                yield process
            finally:
                process.kill()

    def wait_for(self, condition: Callable[[list[Event]], bool], study: str, of: subprocess.Popen[str]) -> None:
        """Wait until the study's journal says so, while it runs."""
        until(lambda: of.poll() is not None or condition(self.events(study)), "what the journal is to say", 600)
        assert of.poll() is None, of.communicate()[0]

    def events(self, study: str) -> list[Event]:
        return [line.event for line in read_lines(self.journal(study))]

    def kill_driver(self) -> None:
        running = [line.split() for line in self.head.run("ps", "-eww", "-o", "pid=,args=").splitlines()]
        (driver,) = [pid for pid, *command in running if command[:1] == ["python"] and "submit.py" in command[1]]
        self.head.run("kill", "-KILL", driver)


@contextlib.contextmanager
def site(folder: Path, shared: Path, lanes: Sequence[int], *, num_off: int = 0) -> Iterator[Site]:
    """Start the machines, with the clone on the laptop. No Ray yet.

    lanes: of one CPU, on each worker; the head has none.
    num_off: the last so many of them are in the cluster's file, and listen to nobody until `switched_on`.
    """
    names = ("laptop", "head", *(f"worker{number}" for number in range(len(lanes))))
    with contextlib.ExitStack() as stack:
        laptop, head, *workers = stack.enter_context(machines(folder, names, [shared]))
        laptop.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(KEY))
        made = Site(laptop, head, workers, shared)
        for machine, number in zip((head, *workers), (0, *lanes), strict=True):
            machine.run("mkdir", str(ON_THE_HEAD))
            machine.run("ln", "-s", str(shared), str(ON_THE_HEAD / "runs"))
            machine.write(LANES, str(number))
        for machine in (head, *workers[: len(workers) - num_off]):
            stack.enter_context(made.switched_on(machine))
        left_out = [f"--exclude={pattern}" for pattern in cluster_yaml()["rsync_exclude"]]
        laptop.run("rsync", "-a", *left_out, f"{CLONE}/", f"{ON_THE_LAPTOP}/")
        laptop.write(ON_THE_LAPTOP / "cluster.yaml", yaml.safe_dump(cluster_file(head, workers)))
        yield made


def cluster_file(head: Machine, workers: Sequence[Machine]) -> dict[str, Any]:
    """The local variant for these machines, whose set-up takes from this machine what it would download."""
    file = local_variant()
    file["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address for worker in workers]}
    file["auth"] |= {"ssh_user": "root", "ssh_private_key": str(KEY)}
    file |= {"min_workers": len(workers), "max_workers": len(workers)}
    start = {
        key: [f"{command} --num-cpus=$(cat {LANES})" if "ray start" in command else command for command in file[key]]
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
    }
    return file | start | {"setup_commands": list(map(_set_up, file["setup_commands"])), "head_setup_commands": []}


def _set_up(command: str) -> str:
    if "cloud-init" in command:  # for a machine that is new
        return "true"
    if "apt-get install" in command:
        return "which rsync tmux"
    if "-m venv" in command:
        return f"test -d ~/env || {sys.executable} -m venv --without-pip ~/env"
    if "pip install" in command:
        packages = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        programs = {
            "batchscout": "batchscout.orchestrator.cli import program",
            "ray": "ray.scripts.scripts import main as program",
        }
        written = {
            f"~/env/bin/{name}": f"#!{HOME}/env/bin/python\nfrom {it}\nprogram()\n" for name, it in programs.items()
        }
        written["$(echo ~/env/lib/python*/site-packages)/all.pth"] = f"{ON_THE_HEAD}\n{packages}\n"
        writes = [f"printf %s {shlex.quote(text)} > {path}" for path, text in written.items()]
        return " && ".join([*writes, "chmod +x ~/env/bin/ray ~/env/bin/batchscout"])
    return command
