"""What is read of control groups: of real ones where this machine lets a test make one, and of files that say the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchscout.trainers.device import cgroup
from tests.support.disk import NotHere
from tests.support.memory_group import MemoryGroup

GIB, MIB = 2**30, 2**20
HOST = 20 * GIB


def kernel(place: Path, cgroups: str, mounts: str) -> Path:
    """A /proc of a process on a host with HOST bytes free, where 7 processes were ended for want of memory."""
    proc = place / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroups)
    (proc / "self/mountinfo").write_text(f"22 1 0:20 / / rw - ext4 /dev/vda rw\n{mounts}")
    (proc / "meminfo").write_text(f"MemTotal: {2 * HOST // 1024} kB\nMemAvailable: {HOST // 1024} kB\n")
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    return proc


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def version_1(place: Path, path: str, root: str = "/") -> Path:
    mounts = f"35 31 0:32 {root} {place}/memory rw,relatime - cgroup cgroup rw,memory\n41 31 0:38 / {place}/unified rw - cgroup2 cgroup2 rw\n"
    return kernel(place, f"4:memory:{path}\n1:cpu:/elsewhere\n0::/\n", mounts)


def version_2(place: Path, path: str, root: str = "/") -> Path:
    return kernel(place, f"0::{path}\n", f"41 31 0:38 {root} {place}/unified rw - cgroup2 cgroup2 rw\n")


def test_a_jobs_own_group_of_version_1_bounds_what_is_free(tmp_path: Path) -> None:
    """As Slurm makes it: the limit is the job's, and the step that the process is in has none of its own."""
    no_limit, proc = 2**63 - 4096, version_1(tmp_path, "/slurm/job_1/step_0")
    job = tmp_path / "memory/slurm/job_1"
    stat = f"total_inactive_file {GIB // 2}"
    group(job, memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB, memory__stat=stat)
    group(job / "step_0", memory__limit_in_bytes=no_limit, memory__usage_in_bytes=GIB // 2, memory__stat=stat)
    assert cgroup.available_bytes(proc) == 3.5 * GIB, "what file pages take is given back when it is asked for"


def test_a_units_own_group_of_version_2_bounds_what_is_free(tmp_path: Path) -> None:
    proc, unit = version_2(tmp_path, "/user.slice/run-1.scope"), tmp_path / "unified/user.slice/run-1.scope"
    group(unit, memory__max=4 * GIB, memory__current=GIB, memory__stat="inactive_file 0")
    assert cgroup.available_bytes(proc) == 3 * GIB
    group(unit, memory__high=2 * GIB)
    assert cgroup.available_bytes(proc) == GIB, "past memory.high the kernel slows every allocation down"
    group(unit.parent, memory__max=2 * GIB, memory__current=2 * GIB + 4096)
    assert cgroup.available_bytes(proc) == 0, "the slice around it has nothing left"


@pytest.mark.parametrize(
    ("version", "path", "root"),
    [(version_1, "/docker/abc", "/docker/abc"), (version_2, "/", "/"), (version_2, "/../xyz", "/")],
)
def test_a_containers_own_group_is_what_is_mounted_there(
    tmp_path: Path, version: Callable[..., Path], path: str, root: str
) -> None:
    proc = version(tmp_path, path, root)
    group(tmp_path / "memory", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    group(tmp_path / "unified", **({} if version is version_1 else {"memory__max": 4 * GIB, "memory__current": GIB}))
    assert cgroup.available_bytes(proc) == 3 * GIB


@pytest.mark.parametrize("version", [version_1, version_2])
def test_the_limit_is_the_least_of_the_group_and_those_around_it_whatever_is_taken(
    tmp_path: Path, version: Callable[..., Path]
) -> None:
    proc = version(tmp_path, "/job/step")
    job, limit = (
        (tmp_path / "memory/job", "memory__limit_in_bytes")
        if version is version_1
        else (tmp_path / "unified/job", "memory__max")
    )
    taken = {"memory__usage_in_bytes": GIB, "memory__current": GIB}
    group(job / "step", **{limit: 2**63 - 4096 if version is version_1 else "max"}, **taken)
    assert cgroup.limit_bytes(proc) is None
    group(job, **{limit: 4 * GIB}, **taken)
    assert cgroup.limit_bytes(proc) == 4 * GIB
    group(job / "step", **{limit: 3 * GIB})
    assert cgroup.limit_bytes(proc) == cgroup.whole_bytes(proc) == 3 * GIB


@pytest.mark.parametrize("version", [version_1, version_2])
def test_without_a_limit_the_host_tells_what_is_free(tmp_path: Path, version: Callable[..., Path]) -> None:
    proc = version(tmp_path, "/user.slice")
    group(tmp_path / "unified/user.slice", memory__max="max", memory__current=GIB)
    assert cgroup.available_bytes(proc) == HOST


def test_kills_are_those_of_the_own_group_and_of_the_host_where_none_counts_them(tmp_path: Path) -> None:
    first, second, neither = (tmp_path / name for name in ("first", "second", "neither"))
    group(first / "memory/job", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    group(second / "unified/job", memory__events="low 0\noom 4\noom_kill 2")
    assert cgroup.memory_kills(version_1(first, "/job")) == 3
    assert cgroup.memory_kills(version_2(second, "/job")) == 2
    assert cgroup.memory_kills(version_2(neither, "/")) == 7


# A real group

LIMIT = 200 * MIB


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A group below this process's own that may take LIMIT bytes."""
    try:
        made = MemoryGroup()
    except NotHere as why:
        pytest.skip(str(why))
    made.limit.write_text(str(LIMIT))
    yield made.folder
    made.remove()


def run_in(group: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in another process that enters the group first."""
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    return subprocess.run([sys.executable, "-c", enter + code, *arguments], capture_output=True, text=True)


def test_a_process_in_a_real_group_is_told_what_the_group_allows(limited_group: Path) -> None:
    done = run_in(limited_group, "from batchscout.trainers.device import cgroup; print(cgroup.available_bytes())")
    assert done.returncode == 0, done.stderr
    assert 0.7 * LIMIT < int(done.stdout) <= LIMIT


REFUSED = """
import sys
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.preflight import check_host
study = {"name": "mine", "model": {"target": "gpt"}, "data": {"target": "python_stdlib"}, "stages": [{"type": "frontier"}]}
for limit in sys.argv[1:]:
    try:
        print(check_host(parse_study(study | {"memory_limit": limit}, "a study")))
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow  # loads torch
def test_a_memory_limit_that_a_real_group_does_not_allow_is_refused(limited_group: Path) -> None:
    """The kernel would end its ranks, though the host has the memory."""
    done = run_in(limited_group, REFUSED, "200MiB", "201MiB")
    assert done.returncode == 0, done.stderr
    fits, refused = done.stdout.splitlines()
    assert fits == "None"
    assert re.fullmatch(
        r"memory_limit is 201 MiB for each of 1 rank, and this machine has .* GiB, of which its control group lets this "
        r"process have 200 MiB; lower memory_limit, or leave it out, and each rank has an equal share", refused
    )  # fmt: skip


def test_a_real_kill_for_want_of_memory_is_counted_in_its_group_and_no_other(limited_group: Path) -> None:
    count = "from batchscout.trainers.device import cgroup; print(cgroup.memory_kills())"
    ours = cgroup.memory_kills()
    before = int(run_in(limited_group, count).stdout)
    killed = run_in(limited_group, f"taken = bytearray({2 * LIMIT}); taken[::4096] = bytes(len(taken[::4096]))")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert int(run_in(limited_group, count).stdout) == before + 1
    assert cgroup.memory_kills() == ours


def test_the_cores_that_this_process_may_use_are_counted_and_not_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cgroup.usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)
    for quota, cores in ((None, len(before)), (0.5, 1), (len(before) + 1.5, len(before))):
        monkeypatch.setattr(cgroup, "cpu_quota", lambda quota=quota: quota)
        assert cgroup.usable_cpus() == cores


def test_the_quota_of_the_control_group_is_read_in_cores(tmp_path: Path) -> None:
    proc, mine = version_2(tmp_path, "/mine"), tmp_path / "unified/mine"
    assert cgroup.cpu_quota(proc) is None
    group(mine, cpu__max="max 100000")
    group(mine.parent, cpu__max="150000 100000")
    assert cgroup.cpu_quota(proc) == 1.5
    group(mine, cpu__max="400000 100000")
    assert cgroup.cpu_quota(proc) == 1.5, "that of the group around it"
