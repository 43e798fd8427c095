"""Ray stays in its room, and what is private of it in one within: with a new Ray that is read first."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.train import ControllerError, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from batchscout.orchestrator.execution.ray_private.errors import told_by
from batchscout.orchestrator.execution.ray_private.train import LaneTrainer

ORCHESTRATOR = Path(__file__).parents[2] / "orchestrator"


def files(*left_out: str) -> list[Path]:
    paths = [path.relative_to(ORCHESTRATOR) for path in sorted(ORCHESTRATOR.rglob("*.py"))]
    return [path for path in paths if not path.is_relative_to(Path(*left_out))]


def imported(file: Path) -> Iterator[str]:
    """The modules and names that a file imports, at its head or inside a function."""
    for node in ast.walk(ast.parse((ORCHESTRATOR / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_attributes(file: Path) -> Iterator[str]:
    """What a file reads with an underscore of anything but itself."""
    for node in ast.walk(ast.parse((ORCHESTRATOR / file).read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        if is_private and ast.unparse(node.value) not in ("self", "os"):
            yield ast.unparse(node)


def test_only_execution_imports_ray() -> None:
    found = {str(file): [name for name in imported(file) if name.split(".")[0] == "ray"] for file in files("execution")}
    assert {file: names for file, names in found.items() if names} == {}


def test_only_one_room_touches_what_is_private_of_ray() -> None:
    assert list(private_attributes(Path("execution/ray_private/train.py"))), "the test sees what it looks for"
    for file in files("execution", "ray_private"):
        private = [name for name in imported(file) if name.split(".")[0] == "ray" and "._" in name]
        if file.parts[0] == "execution":
            private += private_attributes(file)
        assert private == [], file


def test_a_lane_does_without_the_processes_for_ray_data_and_of_a_cleaner_and_nothing_else() -> None:
    def callbacks(trainer: type[DataParallelTrainer]) -> set[str]:
        made = trainer(print, scaling_config=ScalingConfig(num_workers=1))._create_default_callbacks()
        return {type(one).__name__ for one in made}

    left_out = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
    assert callbacks(DataParallelTrainer) - callbacks(LaneTrainer) == left_out


def test_what_a_rank_is_to_run_is_in_no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it may be asked of a node that was lost, for 10 s. Here is no object store at all."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(DataParallelTrainer, "_initialize_and_run_controller", lambda _, **more: told.update(more))
    trainer = LaneTrainer(sorted, train_loop_config={"b": 1, "a": 2}, scaling_config=ScalingConfig(num_workers=1))
    trainer._initialize_and_run_controller(train_fn_ref=None, scaling_policy=None)
    sent = cloudpickle.dumps(told["train_fn_ref"])  # pyright: ignore[reportPrivateImportUsage]
    assert cloudpickle.loads(sent).get()() == ["a", "b"]


@pytest.mark.slow
def test_of_the_processes_of_a_study_those_that_compute_nothing_load_no_torch() -> None:
    """Each is waited for, or starts beside one that is waited for."""
    heavy_for = {"dispatcher": {"ray", "torch", "pydantic"}, "relay": {"torch"}, "controller": {"torch", "ray.tune"}}
    for module, heavy in (heavy_for | {"group": {"torch", "ray.tune"}, "lanes": {"torch"}}).items():
        code = f"import sys, batchscout.orchestrator.execution.{module}; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ORCHESTRATOR.parent)
        assert done.returncode == 0, done.stderr
        assert not heavy & set(done.stdout.split()), module


CAUGHT = """\
import os, signal
import ray
from batchscout.orchestrator.execution.ray_private.connection import shut_down, sigterm_left_alone
from batchscout.orchestrator.signals import all_are_ctrl_c
with all_are_ctrl_c():
    with sigterm_left_alone():
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    shut_down()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        print("in order")
"""


@pytest.mark.ray
def test_a_driver_hears_sigterm_when_ray_is_shut_down() -> None:
    """After `ray.shutdown()` alone the signal has its default action."""
    done = subprocess.run([sys.executable, "-c", CAUGHT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "in order\n"), done.stderr


MET = """\
import os, signal, time
import ray
from batchscout.orchestrator.execution.ray_private.connection import sigterm_left_alone
from batchscout.orchestrator.signals import all_are_ctrl_c
with all_are_ctrl_c(), sigterm_left_alone():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        time.sleep(4)
        print("in order")
"""


@pytest.mark.ray
def test_a_driver_that_rays_own_handler_heard_sigterm_in_is_not_aborted_three_seconds_later() -> None:
    """As in the moments of its start in which that handler is the only one."""
    done = subprocess.run([sys.executable, "-c", MET], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "in order\n"), done.stderr
    assert "SIGTERM received" in done.stderr, "it was Ray's handler that heard it"


SUBSCRIBED = """\
import os, signal, sys, threading
from pathlib import Path
import ray
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.execution.ray_private.connection import servers, shut_down
from batchscout.orchestrator.execution.session import start_ray
from tests.support.studies import ON_TEXT

class Subscriber(ray._raylet.GcsErrorSubscriber):
    def subscribe(self):
        os.kill(servers()["gcs_server"].pid, signal.SIGKILL)
        super().subscribe()

ray._raylet.GcsErrorSubscriber = Subscriber
start_ray(parse_study(ON_TEXT, "it"), None, Path(sys.argv[1]), num_cpus=1)
shut_down()
"""


@pytest.mark.ray
def test_no_thread_of_rays_dies_with_a_traceback_where_a_study_is_stopped_while_ray_starts(tmp_path: Path) -> None:
    """One subscribes to the cluster's errors then, and finds the gcs ended."""
    done = subprocess.run(
        [sys.executable, "-c", SUBSCRIBED, str(tmp_path)], capture_output=True, text=True, cwd=ORCHESTRATOR.parent
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_what_a_rank_raised_before_it_served_is_told_and_not_rays_traceback_of_it() -> None:
    @ray.remote(num_cpus=0)
    def join() -> None:
        raise RuntimeError("Unable to find address for: ib0")

    @ray.remote(num_cpus=0)
    def run() -> None:
        try:
            ray.get(join.remote())
        except RuntimeError as error:
            raise ControllerError(error) from None

    with pytest.raises(ControllerError) as lost:
        ray.get(run.remote())
    assert told_by(lost.value) == "RuntimeError: Unable to find address for: ib0"
    assert told_by(ValueError("as it is")) == "ValueError: as it is"
