"""What can be observed of a machine: values, without a judgement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchscout.orchestrator.environment import Environment


@dataclass(frozen=True)
class Processors:
    system: str
    """Linux, Darwin, ..."""
    cores: int
    """Of the machine."""
    allowed: int
    """Those that this process may run on."""
    quota: float | None
    """The cores' worth of time that its control group gives it; None where there is no limit."""
    load: float
    """Processes that ran or waited for a core, as a mean over the last minute."""

    @property
    def usable(self) -> float:
        return min(self.allowed, self.quota or self.allowed)


@dataclass(frozen=True)
class Memory:
    total_bytes: int
    available_bytes: int
    """What this process may still take."""
    group_limit_bytes: int | None
    """The limit of its control group; None where there is none."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's, as its own library tells of it."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that it can run."""
    num_gpus: int


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    """The compute capability: (9, 0) is sm_90."""
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Imported:
    """What came of importing a library in a process of its own."""

    version: str = ""
    error: str = ""
    """The last line of what was said, where it could not be imported."""


@dataclass(frozen=True)
class Torch:
    imported: Imported
    cuda: str | None = None
    """The CUDA that this build is for; None of a build for CPUs."""
    kernels: tuple[str, ...] = ()
    """What it has kernels for: sm_90, compute_90, ..."""
    gpus: tuple[Gpu, ...] = ()
    """Those that it can use."""
    why_none: str = ""
    """What torch says where it can use none."""


@dataclass(frozen=True)
class Compiler:
    command: str
    path: str | None
    """None where there is none."""
    error: str = ""
    """What it said of a small library with OpenMP, where it could not make one."""


@dataclass(frozen=True)
class Disk:
    holds: str
    """What is kept there, in words."""
    path: Path
    key: str
    """How another place is chosen."""
    free_bytes: int = 0
    error: str = ""
    """Why nothing can be written there."""


@dataclass(frozen=True)
class Cluster:
    address: str
    """RAY_ADDRESS; empty where it is not set."""
    error: str = ""
    """Why `--address auto` does not use it."""
    remedy: str = ""


@dataclass(frozen=True)
class Hub:
    address: str
    is_offline: bool = False
    """True where the environment says that it is not to be asked."""
    error: str = ""
    """Why it does not answer."""


@dataclass(frozen=True)
class Needs:
    """What a study file asks of the machine, as far as reading it tells. Without one, nothing in particular."""

    compiles: bool = True
    libraries: tuple[str, ...] = ()
    """Those beside torch that must be installed."""
    hub_names: tuple[str, ...] = ()
    """Models and data that are named as on the hub and lie in no folder here."""
    memory_knobs: tuple[str, ...] = ()
    """Those that take no library."""
    memory_limit_bytes: int | None = None
    """Of each rank; None where the file does not say it."""
    world_size: int = 1
    lanes: int = 1
    cpus_per_rank: int = 1
    wandb: str = "off"
    """tracking.wandb: off, offline or online."""

    @property
    def num_ranks(self) -> int:
        """Of all lanes together."""
        return self.lanes * self.world_size


@dataclass(frozen=True)
class Seen:
    """All that was observed."""

    needs: Needs
    environment: Environment
    processors: Processors
    memory: Memory
    driver: Driver | None
    """None where there is none."""
    torch: Torch
    compiler: Compiler
    disks: tuple[Disk, ...]
    ray: Imported
    cluster: Cluster
    hub: Hub
    has_wandb_key: bool
    """True if a key for W&B is in the environment or in ~/.netrc."""
    installed: dict[str, str]
    """The versions of optional libraries that are there."""
