"""One study on nodes that are started over SSH, and in it all that happens to a cluster: a node is lost for good, one joins, the head is
restarted, and the driver is killed. It ends as the same study does undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.study.events import Evaluated, Event
from batchscout.orchestrator.study.journal import replay
from tests.faults.driver import check_nothing_was_lost_or_doubled, has
from tests.support import ssh_site
from tests.support.machines import missing
from tests.support.ssh_site import ON_THE_LAPTOP, Site
from tests.support.studies import TINY, grid

EVALUATIONS, BATCHES_BETWEEN, MICRO_BATCH_SIZE = 8, 128, 4
RATES = [1e-4 * 1.5**power for power in range(10)]
LANES = [1, 2, 2]
NUM_STRUCK = 2 + 3 + 3
"""Lanes that trained, at most, when the node, the head and the driver were struck: each goes on from its last evaluation."""
MOST_WARMING_UP = 8
"""Batches of its own on which a process warms up, at most."""


def study_of(name: str, runs: Path) -> dict[str, Any]:
    """Its decisions depend on no clock."""
    return TINY | {
        "name": name,
        "model": {"target": "tests.support.studies:LogsItsBatches", "kwargs": {"log": str(log_of(name, runs))}},
        "sample_budget": EVALUATIONS * BATCHES_BETWEEN * MICRO_BATCH_SIZE,
        "evaluations": EVALUATIONS,
        "kill": {"min_relative_throughput": None},
        "placement": {"lanes": 3, "cpus_per_rank": 1},
        "stages": grid(learning_rate=RATES),
    }


def log_of(name: str, runs: Path) -> Path:
    return runs / f"{name}.jsonl"


@pytest.mark.cluster
@pytest.mark.timeout(1500)
def test_a_study_to_which_all_of_it_happens_ends_as_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> None:
    why = missing()
    if why is not None:
        pytest.skip(why)
    folder, shared = tmp_path_factory.mktemp("machines"), tmp_path_factory.mktemp("shared")
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(ssh_site.site(folder, shared, LANES, num_off=1))
        _, lost, joins = site.workers
        for name in ("struck", "undisturbed"):
            site.write_study(study_of(name, site.runs))
        site.laptop.run("sh", "-c", "umask 077; ray get-auth-token --generate")
        site.ray("up", "--yes", "cluster.yaml")

        with site.submitted("struck", num_nodes=3) as driver:
            site.wait_for(has("evaluated", EVALUATIONS), "struck", driver)
            os.kill(lost.first_process, signal.SIGKILL)  # and with it all that runs there, its sshd, too
            stack.enter_context(site.switched_on(joins))
            site.wait_for(lambda events: joins.name in nodes(events), "struck", driver)
            site.head.run("ray", "stop", "--force")
            said, _ = driver.communicate(timeout=60)
        assert driver.returncode == 1, said
        assert "Nothing is lost" in " ".join(said.split()), said
        so_far = site.events("struck")

        site.ray("up", "--yes", "cluster.yaml")
        with site.submitted("struck", num_nodes=3) as driver:
            site.wait_for(has("evaluated", count(so_far, "evaluated") + EVALUATIONS), "struck", driver)
            site.kill_driver()
            said, _ = driver.communicate(timeout=60)
        assert driver.returncode != 0, said
        assert site.events("struck")[: len(so_far)] == so_far, "what was journaled stays"
        so_far = site.events("struck")
        assert count(so_far, "concluded") == 0, "there was still something to do"

        for name in ("struck", "undisturbed"):
            site.laptop.run(*site.submit(name, num_nodes=3), folder=ON_THE_LAPTOP)
        assert site.events("struck")[: len(so_far)] == so_far
        check_it_ended_as_undisturbed(site)


def check_it_ended_as_undisturbed(site: Site) -> None:
    struck, undisturbed = (replay(site.journal(name), name) for name in ("struck", "undisturbed"))
    assert {trial.id: trial.state for trial in struck.trials.values()} == {
        trial.id: trial.state for trial in undisturbed.trials.values()
    }
    for trial in undisturbed.trials.values():
        losses = [point["val_loss"] for point in struck.trials[trial.id].history]
        assert losses == [point["val_loss"] for point in trial.history], "to the bit"
    found, reference = (
        json.loads((site.runs / name / "recommendation.json").read_text()) for name in ("struck", "undisturbed")
    )
    for key in ("micro_batch_size", "effective_batch_size", "learning_rate"):
        assert found[key] == reference[key]
    assert found["evidence"]["trial"] == reference["evidence"]["trial"]
    check_nothing_was_lost_or_doubled(site.events("struck"), struck)
    trained_again = num_batches(log_of("struck", site.runs)) - num_batches(log_of("undisturbed", site.runs))
    assert trained_again <= NUM_STRUCK * (BATCHES_BETWEEN + MOST_WARMING_UP)


def count(events: list[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


def nodes(events: list[Event]) -> set[str]:
    return {event.lane.node for event in events if isinstance(event, Evaluated) and event.lane is not None}


def num_batches(log: Path) -> int:
    return sum("batch" in json.loads(line) for line in log.read_text().splitlines())
