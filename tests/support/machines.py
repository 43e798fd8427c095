"""Machines of a test's own, in Linux namespaces: each has its own processes, network, host name and copy of the file system.

What runs there sees and ends nothing outside, not even `ray stop`; all of it is gone with the test, which holds each machine's first
process by a pipe. Only root can make them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import descendants, read

CLONE = Path(__file__).parents[2]
HOME = Path("/home/scout")
"""The home of root on each machine, empty but for what a new user has: this machine's own stays unread."""
NAMESPACES = ("--pid", "--net", "--mount", "--uts", "--ipc")
BRIDGE = "10.77.0.1"
TOOLS = ("ip", "nsenter", "rsync", "ssh", "ssh-keygen", "sshd", "tmux", "unshare")
PACKAGES = "apt-get install iproute2 openssh-server rsync tmux"
SEEN = sorted({str(CLONE), sys.prefix, sys.base_prefix})
"""What a machine has of this one even where it lies on a disk of its own."""

FIRST_PROCESS = r"""
set -e
mkdir -p {disk}
mount -t tmpfs -o mode=755,size=2g disk {disk}
mkdir {disk}/written {disk}/work {disk}/root
mount -t overlay -o lowerdir=/,upperdir={disk}/written,workdir={disk}/work root {disk}/root
cd {disk}/root
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 shm dev/shm
mount --rbind /sys sys
mount -t tmpfs run run
for seen in {seen}; do mkdir -p ./$seen; mount --bind -o ro $seen ./$seen; done
for shared in {shared}; do mkdir -p ./$shared; mount --bind $shared ./$shared; done
rm -rf tmp/ray tmp/ray_ssh_* home/scout
mkdir -p run/sshd home/scout/.ssh
cp -r etc/skel/. home/scout
chmod 700 home/scout/.ssh
sed -i 's,^root:.*,root:*:0:0::/home/scout:/bin/bash,' etc/passwd
hostname {name}
rm -f etc/resolv.conf etc/hosts
printf '%s\n' '127.0.0.1 localhost' {hosts} > etc/hosts
ip link set lo up
exec chroot . {python} -c 'import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print("up", flush=True); sys.stdin.read()'
"""
"""What makes a machine, and is its first process, which lets go of orphans that have ended, and ends with the test's pipe. All that it
writes or removes is in the copy."""


def missing() -> str | None:
    """Return why this machine cannot have others in it; None if it can."""
    if os.getuid() != 0:
        return "machines in namespaces are made by root alone"
    lacks = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if lacks:
        return f"{', '.join(lacks)} not installed: {PACKAGES}"
    tried = subprocess.run(["unshare", "--fork", *NAMESPACES, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


@dataclass(frozen=True)
class Machine:
    name: str
    address: str
    first_process: int

    def command(self, command: Sequence[str], folder: Path = HOME) -> list[str]:
        """Return what runs a command on this machine, with a new login's environment."""
        settings = {"HOME": str(HOME), "USER": "root", "TERM": "dumb", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
        settings["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        inside = ["nsenter", f"--target={self.first_process}", *NAMESPACES, "--root"]
        return [
            *inside,
            "env",
            "-i",
            f"--chdir={folder}",
            *(f"{name}={value}" for name, value in settings.items()),
            *command,
        ]

    def run(self, *command: str, code: int = 0, folder: Path = HOME) -> str:
        """Run a command there, and return what it has printed; it must end with this code."""
        there, end = self.command(command, folder), subprocess.DEVNULL
        done = subprocess.run(there, stdin=end, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == code, f"{shlex.join(command)} on {self.name}:\n{done.stdout}"
        return done.stdout

    def write(self, path: Path, text: str, mode: int = 0o644) -> None:
        write = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        there = self.command(["sh", "-c", write, "sh", str(path), f"{mode:o}"])
        subprocess.run(there, input=text, text=True, check=True)

    def set_link(self, *, up: bool) -> None:
        """Plug this machine into the network, or out of it: what it sends then goes nowhere, and nobody is told. Not of the first one."""
        _in_network(self.first_process, f"ip link set eth0 {'up' if up else 'down'}")
        if up:
            _in_network(self.first_process, f"ip route replace default via {BRIDGE}")

    def pids(self, title: str) -> list[int]:
        """Return the processes, as this machine's own kernel numbers them outside, in whose command line the title is."""
        below = descendants(self.first_process)
        return [pid for pid in below if title in read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")]

    def processes(self) -> list[str]:
        """Return the command lines of all that runs there."""
        return self.run("ps", "-eww", "-o", "args=").splitlines()


@contextlib.contextmanager
def machines(folder: Path, names: Sequence[str], shared: Sequence[Path] = ()) -> Iterator[list[Machine]]:
    """Start machines on a network of their own, 10.77.0.1 and so on, whose bridge is on the first one.

    shared: folders of this machine that all of them write to, as to storage in a network.
    """
    with contextlib.ExitStack() as stack:
        addresses = {name: f"{BRIDGE.removesuffix('1')}{number}" for number, name in enumerate(names, 1)}
        made = [stack.enter_context(_machine(folder, name, addresses, shared)) for name in names]
        bridge = made[0].first_process
        _in_network(bridge, "ip link add switch type bridge")
        _in_network(bridge, "ip link set switch up")
        _in_network(bridge, f"ip address add {made[0].address}/24 dev switch")
        for machine in made[1:]:
            pair = f"ip link add {machine.name} type veth peer name eth0 netns {machine.first_process}"
            _in_network(bridge, pair)
            _in_network(bridge, f"ip link set {machine.name} master switch up")
            _in_network(machine.first_process, f"ip address add {machine.address}/24 dev eth0")
            _in_network(machine.first_process, "ip link set eth0 up")
            # To nowhere, but the system's own way to find a machine's address looks for one to the internet.
            _in_network(machine.first_process, f"ip route add default via {made[0].address}")
        yield made


def _in_network(process: int, command: str) -> None:
    subprocess.run(["nsenter", f"--target={process}", "--net", *command.split()], check=True)


@contextlib.contextmanager
def _machine(folder: Path, name: str, addresses: Mapping[str, str], shared: Sequence[Path]) -> Iterator[Machine]:
    """Its first process lives as long as this one holds its pipe, and all others as long as that one."""
    disk = folder / name
    seen, common = (" ".join(shlex.quote(str(path)) for path in paths) for paths in (SEEN, shared))
    hosts = " ".join(shlex.quote(f"{address} {other}") for other, address in addresses.items())
    script = FIRST_PROCESS.format(
        disk=shlex.quote(str(disk)),
        seen=seen,
        shared=common,
        name=name,
        hosts=hosts,
        python=shlex.quote(sys.executable),
    )
    command = ["unshare", "--fork", "--kill-child", *NAMESPACES, "sh", "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        (first,) = descendants(process.pid)
        yield Machine(name, addresses[name], first)
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def listens_for_ssh(machine: Machine, public_key: str) -> Iterator[None]:
    """Run an sshd there, which lets in who has the key."""
    machine.write(HOME / ".ssh/authorized_keys", public_key, 0o600)
    machine.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/etc/ssh/of_the_test")
    options = ["HostKey=/etc/ssh/of_the_test", "PasswordAuthentication=no", "UsePAM=no", "PidFile=none"]
    daemon = ["/usr/sbin/sshd", "-D", "-f", "/dev/null", *(word for option in options for word in ("-o", option))]
    process = subprocess.Popen(machine.command(daemon), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()
