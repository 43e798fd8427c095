"""What in the environment that the program is launched in would break a study. `run` refuses to start for it, and `doctor` tells of it.

Loads neither Ray nor torch: some of it is in the way of their import.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchscout.orchestrator.units import bytes_text, counted, ending_text, listed
from batchscout.trainers.launcher import without_launcher

HARMLESS = {
    "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONUTF8",
}  # fmt: skip
"""Settings of Python that are set in many places, and change nothing that Ray or torch depends on."""


UNLIMITED = sys.maxsize
SHARE_OF_OBJECT_STORE, MOST_OF_OBJECT_STORE = 0.3, 200 * 10**9
"""Ray's own, of the memory that is free."""
SHARE_OF_SHARED_MEMORY, LEAST_OF_OBJECT_STORE = 0.95, 10 * 10**9
"""Ray's own, of /dev/shm: more than that share it takes only up to this."""
LEAST_OPEN_FILES = 256
"""Ray's servers hold some 70 each, and more with every rank."""
LEAST_THREADS = 300
"""Those of a study with one rank on two cores."""
_OF_TLS = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_SIOCGIFADDR = 0x8915
"""Linux' number of the question for the IPv4 address of a network interface."""
LEAST_ADDRESSES_BYTES = 8 * 2**30
"""What Ray's raylet and a rank reserve beside the object store, nearly all of it without using it."""


@dataclass(frozen=True)
class Limits:
    """What the operating system lets a process have (ulimit -H), each UNLIMITED where it sets none."""

    open_files: int = UNLIMITED
    """The most that this process may raise its own limit to."""
    addresses_bytes: int = UNLIMITED
    file_bytes: int = UNLIMITED
    threads: int = UNLIMITED
    """How many more this user may start."""
    object_store_bytes: int = 0
    """How large a file in memory Ray makes of it."""
    shared_memory_bytes: int | None = None
    """The size of /dev/shm; None where there is none."""


@dataclass(frozen=True)
class Environment:
    """What of it matters to a study."""

    variables: Mapping[str, str]
    optimize: int = 0
    """Python's -O, as a number: 1 leaves out asserts, 2 docstrings, too."""
    warning_options: Sequence[str] = ()
    """Python's -W and PYTHONWARNINGS, one each: action:message:category:module:line."""
    interfaces: Sequence[str] = ()
    """The network interfaces of this machine that have an address."""
    without_address: Sequence[str] = ()
    """Its others, such as one that is down."""
    most: Limits = Limits()
    has_bash: bool = True
    """Whether a program of that name is on the PATH."""
    has_home: bool = True
    """False where neither HOME nor the machine's list of users says where this user's home is."""
    has_ray_folder: bool = True
    """False where RAY_TMPDIR names what is no folder."""
    directory: str = "/"
    """In which it runs, as Python reads its name."""
    reads_utf8: bool = True
    """Whether that is how Python reads names of files."""
    missing_tls_files: Sequence[str] = ()
    """Which of RAY_TLS_* name no file."""


@dataclass(frozen=True)
class Obstacle:
    """A part of the environment with which no study runs."""

    finding: str
    remedy: str


def observed_environment() -> Environment:
    names = [name for _, name in socket.if_nameindex()]
    addressed = [name for name in names if _has_address(name)]
    return Environment(
        dict(os.environ),
        sys.flags.optimize,
        tuple(sys.warnoptions),
        addressed,
        [name for name in names if name not in addressed],
        observed_limits(),
        has_bash=shutil.which("bash") is not None,
        has_home=not os.path.expanduser("~").startswith("~"),
        has_ray_folder=Path(os.environ.get("RAY_TMPDIR") or "/").is_dir(),
        directory=_directory(),
        reads_utf8=sys.getfilesystemencoding() == "utf-8",
        missing_tls_files=[name for name in _OF_TLS if not Path(os.environ.get(name) or "/").is_file()],
    )


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # whoever needs it says so
        return "/"


def _has_address(interface: str) -> bool:
    with contextlib.suppress(OSError):  # there is no IPv6
        if any(line.split()[-1] == interface for line in Path("/proc/net/if_inet6").read_text().splitlines()):
            return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):  # it has none
        fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)))
        return True
    return False


def observed_limits() -> Limits:
    from batchscout.trainers.device import cgroup

    def most(what: int, which: int = 1) -> int:
        limit = resource.getrlimit(what)[which]  # the hard one, to which Ray raises that of open files
        return UNLIMITED if limit == resource.RLIM_INFINITY else limit

    threads = UNLIMITED if os.getuid() == 0 else most(resource.RLIMIT_NPROC, 0)
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None
    return Limits(
        open_files=most(resource.RLIMIT_NOFILE),
        addresses_bytes=most(resource.RLIMIT_AS, 0),
        file_bytes=most(resource.RLIMIT_FSIZE, 0),
        threads=threads if threads == UNLIMITED else max(0, threads - _threads_of(os.getuid())),
        object_store_bytes=min(
            int(SHARE_OF_OBJECT_STORE * cgroup.available_bytes()),
            MOST_OF_OBJECT_STORE,
            max(LEAST_OF_OBJECT_STORE, int(SHARE_OF_SHARED_MEMORY * (shared or 0))),
        ),
        shared_memory_bytes=shared,
    )


def host_bytes() -> int:
    """Return how much memory this host has, whoever uses it now."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def beyond_memory(limit_bytes: int | None, num_ranks: int, host: int, group: int | None) -> str | None:
    """Return in words how ranks that may take so much each may take more memory than this machine has, or than this process's control
    group may take: the kernel ends whoever takes more. None where they may not."""
    if limit_bytes is None or limit_bytes * num_ranks <= min(host, group or host):
        return None
    of_group = "" if group is None else f", of which its control group lets this process have {bytes_text(group)}"
    return (
        f"memory_limit is {bytes_text(limit_bytes)} for each of {counted(num_ranks, 'rank')}, and this machine has "
        f"{bytes_text(host)}{of_group}"
    )


def _threads_of(user: int) -> int:
    """Return how many threads a user's processes have, which count as processes to the kernel."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += len([*(process / "task").iterdir()]) if process.stat().st_uid == user else 0
    return found


def obstacles(found: Environment) -> Iterator[Obstacle]:
    """Yield what is in the way of every process that imports Ray and torch."""
    train = found.variables.get("RAY_TRAIN_V2_ENABLED")
    if train is not None and train.lower() not in ("1", "true"):  # as Ray reads it
        yield Obstacle(
            f"RAY_TRAIN_V2_ENABLED is {train!r}, and batchscout runs on the second version of Ray Train, which this turns off",
            "unset RAY_TRAIN_V2_ENABLED",
        )
    if found.optimize >= 1:
        yield Obstacle(
            f"Python leaves out {'asserts' if found.optimize == 1 else 'asserts and docstrings'} (PYTHONOPTIMIZE, or -O), without which ranks "
            "crash, and Ray is not even imported without its docstrings",
            "unset PYTHONOPTIMIZE",
        )
    later = [number for number, option in enumerate(found.warning_options) if _is_of_all(option)]
    options = found.warning_options[later[-1] if later else 0 :]  # one of all warnings overrides those before it
    if of_all_modules := [option for option in options if _is_error_everywhere(option)]:
        yield Obstacle(
            f"Python turns every warning into an error ({', '.join(of_all_modules)} in PYTHONWARNINGS, or with -W), so warnings of "
            "their own libraries end Ray's servers",
            "unset PYTHONWARNINGS, or name your own module in it (error:::my_module)",
        )
    if found.variables.get("RAY_USE_TLS", "").lower() in ("1", "true") and found.missing_tls_files:  # as Ray reads it
        yield Obstacle(
            f"RAY_USE_TLS is {found.variables['RAY_USE_TLS']}, and {listed(found.missing_tls_files)} {'names' if len(found.missing_tls_files) == 1 else 'name'} no file: "
            "Ray's processes would hang",
            "unset RAY_USE_TLS, or name certificate, key and authority",
        )
    if not found.has_home:
        yield Obstacle(
            f"HOME is not set, and /etc/passwd has no user {os.getuid()}: Ray looks for a home when it is imported",
            "set HOME to a folder that this user may write (export HOME=/tmp/home)",
        )


def obstacles_here(found: Environment, num_ranks: int, *, on_gpu: bool) -> Iterator[Obstacle]:
    """Yield what is in the way of a study that has its Ray and its ranks on this machine. num_ranks: those of one trial."""
    if not found.has_bash:  # Ray would start again and again what cannot start, without a word
        yield Obstacle(
            f"Ray starts its processes with bash, and there is none on the PATH ({found.variables.get('PATH', '')})",
            "install it (apt-get install bash, or apk add bash), or add its folder to PATH",
        )
    yield from _name_of(found)
    if not found.has_ray_folder:
        yield Obstacle(
            f"RAY_TMPDIR is {found.variables['RAY_TMPDIR']}, where Ray's logs and sockets would lie, and that is no folder",
            "make it, or unset RAY_TMPDIR",
        )
    if counted := found.variables.get("RAY_OVERRIDE_RESOURCES"):
        yield Obstacle(
            f"RAY_OVERRIDE_RESOURCES is {counted}, and a study that has this machine alone would get what Ray counts by it, not what is there",
            "unset RAY_OVERRIDE_RESOURCES, or start Ray with it yourself (ray start --head) and run with --address auto",
        )
    addresses = LEAST_ADDRESSES_BYTES + found.most.object_store_bytes
    if found.most.addresses_bytes < addresses:
        yield Obstacle(
            f"a process may have {bytes_text(found.most.addresses_bytes)} of address space (ulimit -v), and Ray reserves {bytes_text(addresses)}, "
            "though it uses little of it",
            "remove the limit (ulimit -v unlimited), and hold the ranks to memory_limit in the study file",
        )
    yield from _limits(found.most)
    if num_ranks > 1:
        yield from obstacles_between_ranks(found, on_gpu=on_gpu)


def _name_of(found: Environment) -> Iterator[Obstacle]:
    """Yield what is wrong with the name of the directory, which Ray tells its processes as UTF-8."""
    try:
        found.directory.encode()
    except UnicodeEncodeError:
        raw = found.directory.encode(errors="surrogateescape")
        if found.reads_utf8:
            yield Obstacle(
                f"the name of this folder, {raw!r}, is not UTF-8, as which Ray tells its processes where they run",
                "rename it",
            )
        else:
            yield Obstacle(
                f"Python reads no names as UTF-8 (LC_ALL, LANG, PYTHONUTF8), and that of this folder, {raw!r}, is more than ASCII",
                "set LC_ALL=C.UTF-8, and unset PYTHONUTF8",
            )


def _limits(most: Limits) -> Iterator[Obstacle]:
    """Yield the limits of the operating system under which Ray does not start, or ends soon after."""
    if most.open_files < LEAST_OPEN_FILES:
        yield Obstacle(
            f"a process may have {most.open_files} files open (ulimit -Hn), and Ray needs at least {LEAST_OPEN_FILES}",
            "raise the limit (ulimit -Hn 65536 as root, or nofile in /etc/security/limits.conf)",
        )
    if most.threads < LEAST_THREADS:
        yield Obstacle(
            f"this user may start {most.threads} more threads (ulimit -u), and a study needs at least {LEAST_THREADS}",
            "raise the limit (ulimit -u 65536, or nproc in /etc/security/limits.conf), or end what else this user runs",
        )
    if most.file_bytes < most.object_store_bytes:
        yield Obstacle(
            f"a file may have {bytes_text(most.file_bytes)} (ulimit -f), and Ray's object store is one of {bytes_text(most.object_store_bytes)}",
            "remove the limit (ulimit -f unlimited)",
        )


def _is_error_everywhere(option: str) -> bool:
    """True of an option that makes an error of what Ray's libraries warn of, in all modules."""
    action, message, category, module, _ = (*option.split(":"), "", "", "", "")[:5]
    return action != "" and "error".startswith(action) and not message and not module and category in _RAYS_WARNINGS


_RAYS_WARNINGS = ("", "Warning", "DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning")


def _is_of_all(option: str) -> bool:
    _, message, category, module, _ = (*option.split(":"), "", "", "", "")[:5]
    return not (message or category or module)


def obstacles_between_ranks(found: Environment, *, on_gpu: bool) -> Iterator[Obstacle]:
    """Yield what is wrong with the network interface that the ranks are told to use. gloo wants every name to be there, NCCL one that begins
    with a name; to NCCL `=` says that a name is whole, and `^` that it uses all others."""
    variable = "NCCL_SOCKET_IFNAME" if on_gpu else "GLOO_SOCKET_IFNAME"
    value = found.variables.get(variable, "")
    sign = value[:1] if on_gpu and value.startswith(("^", "=")) else ""
    if not value or sign == "^":
        return
    names, is_whole = value.removeprefix(sign).split(","), not on_gpu or sign == "="
    missing = [
        name for name in names if not any(one == name if is_whole else one.startswith(name) for one in found.interfaces)
    ]
    if missing == names if on_gpu else missing:
        down = [name for name in missing if name in found.without_address]
        here = socket.gethostname()
        lacks = (
            f"{here}'s network interface {' or '.join(down)} has no address"
            if down
            else f"{here} has no network interface {' or '.join(missing)}"
        )
        yield Obstacle(
            f"{variable} is {value}, and {lacks}, by which the ranks could reach each other; {'those with one are' if down else 'it has'} "
            f"{', '.join(found.interfaces)}",
            f"unset {variable}, or name one that is there",
        )


def refuse(found: Iterable[Obstacle]) -> None:
    """Raise ValueError where there are any, with each."""
    if told := [f"{one.finding}; {one.remedy}" for one in found]:
        raise ValueError("\n".join(told))


@contextlib.contextmanager
def fit_environment() -> Iterator[None]:
    """Within this a study can run: nothing is in its way, and what a launcher has left is put aside. To be entered before Ray or torch is
    imported. Raises ValueError where either would break, or is of a version that batchscout does not run with."""
    from batchscout.orchestrator.installed import refuse_other_versions  # here: `--help` need not load it

    refuse(obstacles(observed_environment()))
    refuse_other_versions()
    with without_launcher() as names:
        if names:
            print(f"batchscout: {launcher_text(names)}", file=sys.stderr, flush=True)
        yield


def launcher_text(names: Sequence[str]) -> str:
    own = "a study has ranks of its own (world_size)"
    if "ACCELERATE_MIXED_PRECISION" in names:
        own += ", and trains in its own precision: to train as under the launcher, set it in the study file (precision: bfloat16)"
    return (
        f"not used are {', '.join(names)}, by which a launcher tells its ranks who they are and how they train: {own}"
    )


@contextlib.contextmanager
def importing_ray() -> Iterator[None]:
    """Import Ray within this. Raises ValueError, with the settings to suspect, where Ray's own code crashes or raises: it takes some of its
    settings for numbers, and names none of them."""
    of_its_servers = [name for name in os.environ if name.startswith("RAY_") and name[4:5].islower()]
    if of_its_servers and "ray" not in sys.modules:  # its part in C++ reads those, and would end this process
        code = subprocess.run([sys.executable, "-c", "import ray"], capture_output=True).returncode
        if code < 0:
            raise ValueError(
                f"a process that imports Ray {ending_text(code)}, as it does for a setting of the wrong type; correct or unset "
                f"{', '.join(of_its_servers)}"
            )
    try:
        yield
    except Exception as error:
        spec, suspects = importlib.util.find_spec("ray"), settings_to_suspect(os.environ)
        places = (spec and spec.submodule_search_locations) or ()
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not suspects or not any(file.startswith(f"{place}{os.sep}") for file in files for place in places):
            raise
        raise ValueError(f"Ray cannot be imported ({type(error).__name__}: {error}); {suspects}") from error


def settings_to_suspect(variables: Mapping[str, str]) -> str:
    """Return, for whoever sees Ray or torch fail without a cause, which settings of theirs and Python's the environment has; empty where
    there are none."""
    told = ("PYTHON", "RAY_", "TORCH")
    found = sorted(name for name in variables if name.startswith(told) and name not in HARMLESS)
    return f"the environment has {', '.join(found)}: try it without" if found else ""
