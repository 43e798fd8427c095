"""Studies on several nodes of unequal kinds, simulated on this machine: where their ranks run, and what is said of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.study.events import Interrupted
from batchscout.orchestrator.study.state import Study
from tests.faults.driver import Driver, has
from tests.support.nodes import cluster_of
from tests.support.processes import kernel_tells, kill_node_of
from tests.support.studies import TINY, grid

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LARGE, SMALL = {"accelerator_type:large": 1}, {"accelerator_type:small": 1}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes of the large kind, and one of the small kind, with 2 CPUs each."""
    with cluster_of([{"num_cpus": 2, "resources": kind} for kind in (LARGE, LARGE, SMALL)]) as address:
        yield address


def ended(address: str, folder: Path, **changes: Any) -> tuple[int, str, Driver]:
    folder.mkdir()
    model = {"target": "tests.support.studies:SaysItsNode", "kwargs": {"log": str(folder / "nodes")}}
    study = TINY | {"name": "placed", "sample_budget": 64, "stages": grid(learning_rate=[1e-3])}
    driver = Driver(folder, study | {"model": model} | changes, address)
    driver.start()
    return *driver.end(), driver


def losses(study: Study) -> list[float | None]:
    (trial,) = study.trials.values()
    return [point["val_loss"] for point in trial.history]


def test_two_ranks_on_two_nodes_train_to_the_losses_of_two_on_one(address: str, tmp_path: Path) -> None:
    """The former on the kind of which there is the most, where the third node is left idle and named; the latter on the kind that the
    study file names."""
    studies = {}
    for strategy, kind, num_nodes in [("spread", None, 2), ("strict_pack", "small", 1)]:
        placement = {"strategy": strategy, "device": kind, "cpus_per_rank": 1}
        code, said, driver = ended(address, tmp_path / strategy, world_size=2, placement=placement)
        assert code == 0, said
        assert len(set((tmp_path / strategy / "nodes").read_text().split())) == num_nodes
        studies[strategy] = driver.study()
    assert [study.facts.device_kind for study in studies.values()] == ["large", "small"]
    told = [notice.text for study in studies.values() for notice in study.notices[None]]
    assert "runs on the 4 CPUs of type large alone, and leaves 2 CPUs of type small (" in told[0]
    assert "runs on the 2 CPUs of type small alone, and leaves 4 CPUs of type large (" in told[1]
    for study in studies.values():
        (hold,) = next(iter(study.trials.values())).holds
        assert hold.lane is not None
        assert hold.lane.devices == (study.facts.measured_on,), "each result says what it was measured on"
    assert losses(studies["spread"]) == pytest.approx(losses(studies["strict_pack"]), rel=1e-6)
    assert len(losses(studies["spread"])) == TINY["evaluations"]


def test_a_node_that_goes_with_one_rank_of_a_lane_is_no_fault_of_its_trial(tmp_path: Path) -> None:
    """The other rank fails in a collective at once, and Ray tells of the lost one a second later."""
    model = {"target": "tests.support.studies:LogsItsBatches", "kwargs": {"log": str(tmp_path / "batches")}}
    long = {"name": "lost", "model": model, "sample_budget": 20_000, "evaluations": 100, "world_size": 2}
    placement = {"strategy": "spread", "cpus_per_rank": 1}
    with cluster_of([{"num_cpus": 1}] * 3) as address:
        study = TINY | long | {"placement": placement, "stages": grid(learning_rate=[1e-3])}
        driver = Driver(tmp_path, study, address)
        driver.start()
        try:
            driver.wait_until(has("evaluated"))
            lines = [json.loads(line) for line in (tmp_path / "batches").read_text().splitlines()]
            kill_node_of(next(line["pid"] for line in reversed(lines) if line.get("rank") == 1))
            driver.wait_until(lambda events: events[-1].kind == "evaluated" and has("interrupted")(events))
            lost = [event for event in driver.events() if isinstance(event, Interrupted)]
            (reason,) = [event.reason for event in lost]
            assert reason == "rank 1 was killed by SIGKILL" or not kernel_tells()
        finally:
            driver.send(signal.SIGKILL)


def test_what_no_node_holds_is_bad_input_before_anything_starts(address: str, tmp_path: Path) -> None:
    placement = {"strategy": "strict_pack"}
    code, output, driver = ended(address, tmp_path / "refused", world_size=3, placement=placement)
    assert code == 2, output
    assert (
        "batchscout: placement.strategy is strict_pack, so that world_size 3 takes a node that holds 3 ranks (1 CPU each), and the "
        "largest holds 2; lower world_size"
    ) in " ".join(output.split())
    assert "Traceback" not in output
    assert driver.study().trials == {}
