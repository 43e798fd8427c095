"""A real study, struck at random moments at every level, again and again.

    python -m tests.fault_harness [--faults 100] [--seed 0] [--levels driver,lane,...] [--longest-quiet 20]

Some levels are of a two-node cluster that the study is connected to, some of a study with a cluster of its own, some of machines in
namespaces; the last, `memory` and `power` take root. The study's decisions depend on no clock, so whatever is struck it must end as it does
undisturbed: the same journal but for its waits, the same recommendation, the same losses to the bit. Prints a line for
every fault; what is violated raises.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.execution.local_cluster import protect_local_cluster
from batchscout.orchestrator.execution.session import start_ray, worker_environment
from batchscout.orchestrator.signals import all_are_ctrl_c
from tests.faults import own_cluster, several_machines, shared_cluster
from tests.faults.laws import (
    batches_in_order,
    check_it_ended_as_undisturbed,
    check_journal_only_grew,
    check_nothing_was_trained_twice,
)
from tests.faults.own_cluster import OwnCluster
from tests.faults.scene import STUDY, Scene
from tests.faults.several_machines import SeveralMachines
from tests.faults.shared_cluster import SharedCluster
from tests.support.disk import Disk, NotHere
from tests.support.memory_group import MemoryGroup
from tests.support.storage import interposed_library

SECONDS_TO_FIND_ROOM = "1"
LEVELS = [*shared_cluster.FAULTS, *own_cluster.FAULTS, *several_machines.FAULTS]
AnyScene = TypeVar("AnyScene", bound=Scene)
Faults = Mapping[str, Callable[[AnyScene], str | None]]


def strike(
    scene: AnyScene, faults: Faults[AnyScene], levels: Sequence[str], count: int, longest_quiet_seconds: float
) -> Counter[str]:
    """Studies in which `count` faults happen, one after another, each study to its end."""
    undisturbed, order = scene.driver, batches_in_order()
    scene.start()
    check_it_ended(scene)
    check_nothing_was_trained_twice(scene, order)
    struck, turns = Counter[str](), itertools.cycle(levels)
    while struck.total() < count:
        scene.new_study()
        scene.start()
        while not scene.driver.ends_within(scene.chance.uniform(0, longest_quiet_seconds)):
            if struck.total() < count:
                scene.known = scene.driver.events()
                before, level = len(scene.known), next(turns)
                what = faults[level](scene)
                check_journal_only_grew(scene)
                if what is None:  # it comes again
                    turns = itertools.chain([level], turns)
                    continue
                struck[level] += 1
                print(f"{struck.total():4} of {count}: {what}, after {before} events", flush=True)
        check_it_ended(scene)
        check_it_ended_as_undisturbed(scene, undisturbed)
        check_nothing_was_trained_twice(scene, order)
        scene.check_nothing_is_left_over()
        print("     the study ended as it does undisturbed", flush=True)
    return struck


def check_it_ended(scene: Scene) -> None:
    code, output = scene.driver.end()
    assert code == 0, f"exit code {code}: {output}"


@contextlib.contextmanager
def shared_scene(chance: random.Random) -> Iterator[SharedCluster]:
    import ray

    os.environ.update(worker_environment() | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": SECONDS_TO_FIND_ROOM})
    protect_local_cluster()
    with tempfile.TemporaryDirectory() as folder:
        scene = SharedCluster(Path(folder), chance)
        try:
            start_ray(parse_study(STUDY, "the harness's study"), scene.cluster.address, Path(folder))
            yield scene
        finally:
            ray.shutdown()
            scene.cluster.shutdown()


@contextlib.contextmanager
def own_scene(chance: random.Random, levels: Sequence[str]) -> Iterator[OwnCluster]:
    """Raises NotHere where this machine does not allow what a level needs."""
    with contextlib.ExitStack() as on_leaving:
        # Its name is short for the sake of Ray's sockets.
        folder = Path(on_leaving.enter_context(tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp")))
        disk = Disk(folder) if "power" in levels else None
        if disk:
            on_leaving.callback(disk.unmount)
        group = MemoryGroup() if "memory" in levels else None
        if group:
            on_leaving.callback(group.remove)
        scene = OwnCluster(folder, chance, disk, group)
        on_leaving.callback(scene.end)
        yield scene


@contextlib.contextmanager
def machines_scene(chance: random.Random) -> Iterator[SeveralMachines]:
    with contextlib.ExitStack() as on_leaving:
        folder = Path(on_leaving.enter_context(tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp")))
        yield SeveralMachines(folder, chance, on_leaving)


def refusals(levels: Sequence[str]) -> dict[str, str]:
    """Why each of these levels cannot be struck on this machine, of those that cannot."""
    found = dict[str, str]()
    for level in levels:
        try:
            if level == "storage":
                refuse_without_compiler()
            if level in several_machines.FAULTS:
                several_machines.refuse_where_missing()
            elif level in own_cluster.FAULTS:
                with own_scene(random.Random(), [level]):
                    pass
        except NotHere as why:
            found[level] = str(why)
    return found


def refuse_without_compiler() -> None:
    if shutil.which("gcc") is None:
        raise NotHere("there is no gcc, which builds the interposed library")
    interposed_library()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", help=f"taken in turns; default all that this machine allows: {','.join(LEVELS)}")
    parser.add_argument("--longest-quiet", type=float, default=20.0, metavar="SECONDS", help="between two faults")
    chosen = parser.parse_args()
    named = chosen.levels.split(",") if chosen.levels else []
    if unknown := [level for level in named if level not in LEVELS]:
        parser.error(f"there is no level {', '.join(unknown)}; there are {', '.join(LEVELS)}")
    refused = refusals(named or LEVELS)
    said = [f"the level {level} cannot be struck here: {why}" for level, why in refused.items()]
    if named and said:
        parser.error("; ".join(said))
    print(*said, sep="\n", end="\n" if said else "")
    chosen.levels = named or [level for level in LEVELS if level not in refused]
    return chosen


def main() -> None:
    chosen = arguments()
    chance = random.Random(chosen.seed)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, and a driver would ignore it, too
        signal.signal(signal.SIGHUP, lambda *_: None)
    own, shared, several = (
        [level for level in chosen.levels if level in faults]
        for faults in (own_cluster.FAULTS, shared_cluster.FAULTS, several_machines.FAULTS)
    )
    num_shared, num_several = (round(chosen.faults * len(some) / len(chosen.levels)) for some in (shared, several))
    struck = Counter[str]()
    if own:
        with own_scene(chance, own) as scene:
            num_own = chosen.faults - num_shared - num_several
            struck += strike(scene, own_cluster.FAULTS, own, num_own, chosen.longest_quiet)
    if shared:
        with shared_scene(chance) as scene:
            struck += strike(scene, shared_cluster.FAULTS, shared, num_shared, chosen.longest_quiet)
    if several:
        with machines_scene(chance) as scene:
            struck += strike(scene, several_machines.FAULTS, several, num_several, chosen.longest_quiet)
    counts = ", ".join(f"{count} x {level}" for level, count in struck.items())
    print(f"{struck.total()} faults, nothing lost: {counts}")


if __name__ == "__main__":
    with all_are_ctrl_c():  # whatever ends it, it leaves neither a mounted disk nor a control group
        main()
