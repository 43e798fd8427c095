"""The Switchboard without Ray: it is an asyncio object, and a lane is whoever takes from it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from orchestrator.config.trial import base_trial
from orchestrator.execution.dispatcher import MAX_STARTS, Switchboard
from orchestrator.execution.lanes import blame_for
from orchestrator.execution.placement import largest_share
from orchestrator.execution.ranks import memory_reason
from orchestrator.study.messages import Assignment, Blame, Host, Message
from tests.support.studies import tiny_study


def assignment(trial_id: str = "a", key: str = "") -> Assignment:
    return Assignment(trial_id, {}, f"/nowhere/{trial_id}", "token", key=key or trial_id)


def play(scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene; one that waits for what never comes fails instead of hanging."""
    asyncio.run(asyncio.wait_for(scene, timeout=10))


async def lose(board: Switchboard, lane: str, cause: str, blame: Blame = "machine") -> None:
    """Its Train runs end one after another."""
    for _ in range(MAX_STARTS):
        await board.run_lost(lane, cause, blame)


def test_an_assignment_reaches_every_rank_of_the_lane_that_took_it() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        taken = await board.take("lane", "group", 1)
        assert taken == await board.follow("group", 1) == assignment()

    play(scene())


def test_what_a_lane_died_under_comes_again_once_and_then_fails_with_the_cause() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        await board.take("lane", "first group", 1)
        again = await board.take("lane", "second group", 1)
        assert again is not None
        assert (again.trial_id, again.lane_deaths) == ("a", 1)
        await board.cause_of_death("lane", "rank 0: killed", "trial")
        await board.assign(assignment("b"))
        following = await board.take("lane", "third group", 1)
        assert following is not None
        assert following.trial_id == "b", "the next trial is served"
        last = await board.next_message("a")
        assert last.outcome == "failed"
        assert last.reason == "failed: it ended its lane 2 times; last: rank 0: killed"

    play(scene())


def test_a_trial_that_says_nothing_for_too_long_fails_and_its_lane_is_told_to_end() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1, max_silent_seconds=0)
        assert await board.outlook("lane") == "go on", "nothing to say"
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        assert await board.outlook("lane") == "hung"
        assert (await board.next_message("a")).reason.startswith(
            "failed: it said nothing for 0 s, longer than kill.max"
        )
        await board.assign(assignment("b"))
        following = await board.take("lane", "next group", 1)
        assert following is not None
        assert (following.trial_id, following.lane_deaths) == ("b", 0)

    play(scene())


def test_waiting_for_a_verdict_is_no_silence_and_without_a_limit_nothing_is() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1, max_silent_seconds=0)
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        asked = asyncio.create_task(board.ask("a", Message()))
        await board.next_message("a")
        assert await board.outlook("lane") == "go on"
        await board.dismiss("a")
        assert await asked == "stop"
        assert await board.outlook("lane") == "hung", "told to stop, it must say that it has"
        patient = Switchboard(num_lanes=1)
        await patient.assign(assignment())
        await patient.take("lane", "group", 1)
        assert await patient.outlook("lane") == "go on"

    play(scene())


async def dies_twice(board: Switchboard, *hosts: Host) -> Message:
    """What is said of a trial whose lane comes up on these hosts, one after another, and dies under it each time."""
    await board.assign(assignment())
    for turn, host in enumerate(hosts, start=1):
        await board.introduce("lane", host)
        if turn < len(hosts):
            await board.take("lane", f"group {turn}", 1)
    await board.assign(assignment("next"))
    await board.take("lane", "last group", 1)
    return await board.next_message("a")


@pytest.mark.parametrize(
    ("last", "outcome"),
    [(Host("a", "", 6), "out_of_memory"), (Host("a", "", 5), "failed"), (Host("b", "", 9), "failed")],
)
def test_a_process_that_the_kernel_ended_for_want_of_memory_ran_out_of_memory(last: Host, outcome: str) -> None:
    async def scene() -> None:
        ended = await dies_twice(Switchboard(num_lanes=1), Host("a", "", 5), Host("a", "", 5), last)
        assert ended.outcome == outcome
        assert ended.reason.startswith(f"{outcome}: ")

    play(scene())


def test_so_did_one_that_rays_memory_monitor_ended() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        for group in ("first", "second", "third"):
            await board.assign(assignment("next"))
            await board.take("lane", group, 1)
            await board.cause_of_death("lane", "rank 0: killed", "memory")
        ended = await board.next_message("a")
        assert ended.outcome == "out_of_memory"
        assert "the host ran out of memory and ended its process; lower memory_limit" in ended.reason

    play(scene())


def test_a_lane_whose_train_run_is_lost_gets_another_and_its_trial_waits() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        assert await board.run_lost("lane", "ActorDiedError: the controller", "machine")
        last = await board.next_message("a")
        assert (last.outcome, last.reason) == ("interrupted", "interrupted: ActorDiedError: the controller")
        await board.assign(assignment(key="again"))
        again = await board.take("lane", "next group", 1)
        assert again is not None
        assert (again.trial_id, again.lane_deaths) == ("a", 0), "it is not at fault"

    play(scene())


def test_a_train_run_that_went_with_its_starved_process_counts_as_a_death_under_its_trial() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        for group in ("first", "second"):
            await board.take("lane", group, 1)
            assert await board.run_lost("lane", "ControllerError: killed", "memory")
        assert (await board.next_message("a")).outcome == "out_of_memory"

    play(scene())


def test_a_lane_that_the_cluster_has_no_room_for_is_never_given_up_and_its_trial_goes_to_another() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=2)
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        await board.cause_of_death("lane", "rank 0: its node has died", "machine")
        for _ in range(2 * MAX_STARTS):
            assert await board.no_room("lane")
        last = await board.next_message("a")
        assert (last.outcome, last.reason) == ("interrupted", "interrupted: rank 0: its node has died")
        await board.assign(assignment("b"))
        assert await board.take("other lane", "other group", 1) == assignment("b")
        await board.assign(assignment("c"))
        assert await board.take("lane", "later group", 1) == assignment("c"), "its node is back"
        await board.close()
        assert not await board.no_room("lane")

    play(scene())


def test_a_lane_whose_train_runs_end_before_they_take_a_trial_is_given_up() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        again = [await board.run_lost("lane", "no shared memory", "machine") for _ in range(3)]
        assert again == [True, True, False]
        await board.assign(assignment())
        assert (await board.next_message("a")).outcome == "no_lane"

    play(scene())


def test_a_trial_whose_processes_are_told_to_end_stops_and_waits_for_others() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        assert await board.say("a", Message()) == "go on"
        assert await board.outlook("lane", leaving=True) == "go on", "it has time to save"
        assert await board.say("a", Message(metrics={"samples_seen": 8})) == "stop"
        assert await board.say("a", Message(outcome="stopped")) == "stop"
        await board.freed("lane")
        last = [await board.next_message("a") for _ in range(3)][-1]
        assert (last.outcome, last.reason) == ("interrupted", "interrupted: its processes were told to end")
        await board.assign(assignment("b"))
        assert await board.take("lane", "group", 2) is None, "nothing begins there any more"
        assert await board.follow("group", 2) is None
        await board.introduce("lane", Host("a", "", 0))
        assert await board.take("lane", "new group", 1) == assignment("b")

    play(scene())


def test_who_is_killed_after_being_told_to_end_has_not_died_of_its_trial() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        await board.outlook("lane", leaving=True)
        await board.cause_of_death("lane", "rank 0: killed", "trial")
        await board.introduce("lane", Host("a", "", 0))
        await board.assign(assignment("b"))
        await board.take("lane", "new group", 1)
        assert (await board.next_message("a")).outcome == "interrupted"

    play(scene())


def test_a_node_that_took_its_lane_with_it_counts_once_against_the_lane() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        for _ in range(MAX_STARTS - 1):
            await board.cause_of_death("lane", "its node has died", "machine")
            assert await board.run_lost("lane", "no node to start on", "machine")

    play(scene())


def test_processes_that_are_told_to_end_while_they_are_idle_take_nothing_more() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        idle = asyncio.create_task(board.take("lane", "group", 1))
        await asyncio.sleep(0)
        await board.outlook("lane", leaving=True)
        assert await idle is None

    play(scene())


def test_a_verdict_reaches_a_rank_that_is_told_to_end_as_stop() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        await board.outlook("lane", leaving=True)
        waiting = asyncio.create_task(board.ask("a", Message(evaluated=True)))
        assert (await board.next_message("a")).evaluated
        following = asyncio.create_task(board.next_message("a"))
        assert await waiting == "stop"
        await board.say("a", Message(outcome="stopped"))
        assert (await following).outcome == "interrupted"

    play(scene())


@pytest.mark.parametrize(
    ("said", "blame"),
    [
        ("Task was killed due to the node running low on memory.", "memory"),
        ("The actor died unexpectedly before finishing this task: its node has died.", "machine"),
        ("ValueError: my own mistake", "trial"),
    ],
)
def test_who_is_to_blame_is_read_from_what_ray_says(said: str, blame: str) -> None:
    assert blame_for(said) == blame


def test_what_the_lanes_run_on_is_known_when_the_first_is_up_and_never_where_none_comes() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=2)
        asked = asyncio.create_task(board.device())
        await board.introduce("lane", Host("a", "a GPU, 80 GB", 0))
        assert await asked == "a GPU, 80 GB"
        without = Switchboard(num_lanes=1)
        asked = asyncio.create_task(without.device())
        await lose(without, "lane", "no GPU")
        assert await asked == ""

    play(scene())


def test_asking_for_the_next_message_lets_a_waiting_rank_go_on_and_dismissing_stops_it() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        for verdict in ("go on", "stop"):
            await board.assign(assignment())
            asking = asyncio.create_task(board.ask("a", Message(rungs=(4,))))
            assert (await board.next_message("a")).rungs == (4,)
            assert not asking.done(), "a rank waits at a rung until the driver has spoken"
            if verdict == "go on":
                waiting = asyncio.create_task(board.next_message("a"))
                assert await asking == "go on"
                waiting.cancel()
            else:
                await board.dismiss("a")
                assert await asking == "stop"

    play(scene())


def test_a_verdict_is_not_given_before_the_question_is_read() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        await board.say("a", Message(metrics={"samples_seen": 1}))
        asking = asyncio.create_task(board.ask("a", Message(rungs=(4,))))
        await asyncio.sleep(0)
        assert (await board.next_message("a")).metrics == {"samples_seen": 1}
        assert (await board.next_message("a")).rungs == (4,)
        await asyncio.sleep(0)
        assert not asking.done(), "the driver has read it only now"
        waiting = asyncio.create_task(board.next_message("a"))
        assert await asking == "go on"
        waiting.cancel()

    play(scene())


def test_a_lane_that_dies_idle_does_not_take_what_its_successor_is_to_have() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        dead = asyncio.create_task(board.take("lane", "first group", 1))
        await asyncio.sleep(0)
        alive = asyncio.create_task(board.take("lane", "second group", 1))
        await asyncio.sleep(0)
        await board.assign(assignment())
        assert await alive == assignment()
        assert await dead is None

    play(scene())


def test_a_lane_that_is_lost_hands_its_trial_to_another() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=2)
        await board.assign(assignment())
        await board.take("first lane", "group", 1)
        await lose(board, "first lane", "its node is gone", "trial")
        again = await board.take("second lane", "other group", 1)
        assert again is not None
        assert again.trial_id == "a"

    play(scene())


def test_a_trial_whose_relay_was_lost_is_left_by_the_lane_that_has_it_before_another_takes_it() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=2)
        await board.assign(assignment(key="lost"))
        await board.take("first lane", "group", 1)
        await board.assign(assignment(key="again"))
        taking = asyncio.create_task(board.take("second lane", "other group", 1))
        await asyncio.sleep(0)
        assert await board.say("lost", Message(metrics={"samples_seen": 8})) == "stop"
        assert not taking.done(), "the first lane saves a checkpoint now"
        await board.freed("first lane")
        assert await taking == assignment(key="again")

    play(scene())


def test_the_last_word_of_a_paused_trial_is_not_taken_for_that_of_its_continuation() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=2)
        await board.assign(assignment(key="first"))
        await board.dismiss("first")
        await board.assign(assignment(key="second"))
        assert await board.say("first", Message(outcome="stopped")) == "stop"
        assert await board.say("second", Message(metrics={"samples_seen": 8})) == "go on"
        assert (await board.next_message("second")).metrics == {"samples_seen": 8}

    play(scene())


def test_the_other_ranks_of_a_dead_group_are_not_left_waiting() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        idle = asyncio.create_task(board.take("lane", "first group", 1))
        following = asyncio.create_task(board.follow("first group", 1))
        early = asyncio.create_task(board.follow("second group", 1))
        await asyncio.sleep(0)
        successor = asyncio.create_task(board.take("lane", "second group", 1))
        assert await following is None
        assert await idle is None
        await board.assign(assignment())
        assert await successor == await early == assignment()

    play(scene())


def test_the_other_ranks_end_only_when_rank_0_has_said_its_last_word() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        await board.take("lane", "group", 1)
        ending = asyncio.create_task(board.until_freed("lane", "a"))
        await board.say("a", Message(outcome="complete"))
        assert not ending.done()
        await board.freed("lane")
        await ending

    play(scene())


def test_what_wants_fresh_processes_is_given_back_without_a_death_and_is_the_next_one_again() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment("a"))
        await board.assign(assignment("b"))
        await board.take("lane", "group", 2)
        ending = asyncio.create_task(board.until_freed("lane", "a"))
        await board.give_back("lane", "a")
        await ending
        assert await board.take("lane", "other group", 1) == assignment("a")
        await board.freed("lane")
        await board.take("lane", "other group", 2)
        await board.dismiss("b")
        await board.give_back("lane", "b")
        await board.assign(assignment("c"))
        following = await board.take("lane", "third group", 1)
        assert following is not None
        assert following.trial_id == "c", "nobody wants b any more"

    play(scene())


def test_a_lane_that_never_comes_up_is_given_up_with_its_reason() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment())
        for _ in range(2):
            await board.cause_of_death("lane", "rank 0: no shared memory", "trial")
        await board.take("lane", "group", 1)  # it came up after all: the count begins anew
        for _ in range(3):
            await board.cause_of_death("lane", "rank 0: no shared memory", "trial")
        last = await board.next_message("a")
        assert last.outcome == "no_lane"
        assert last.reason.endswith("its processes ended 3 times before they took a trial: rank 0: no shared memory")

    play(scene())


def test_without_lanes_trials_end_at_once_with_what_the_last_lane_said() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        await board.assign(assignment("before"))
        await lose(board, "lane", "no space left on device")
        await board.assign(assignment("after"))
        for trial_id in ("before", "after"):
            last = await board.next_message(trial_id)
            assert last.outcome == "no_lane"
            assert last.reason.startswith("no lane is left; the last one said: ")
            assert last.reason.endswith(": no space left on device")

    play(scene())


def test_closing_sends_idle_ranks_home() -> None:
    async def scene() -> None:
        board = Switchboard(num_lanes=1)
        idle = asyncio.create_task(board.take("lane", "group", 1))
        await asyncio.sleep(0)
        assert await board.outlook("lane") == "go on"
        await board.close()
        assert await idle is None
        assert await board.outlook("lane") == "closed"

    play(scene())


@pytest.mark.parametrize(
    ("nodes", "ranks", "share"),
    [([2], 1, 2), ([2], 2, 1), ([8] * 4, 1, 8), ([8] * 4, 4, 8), ([8] * 4, 5, 4), ([9, 3], 2, 4), ([1], 2, 1)],
)
def test_a_rank_gets_the_most_cpus_that_every_rank_can_have_on_one_node(
    nodes: list[int], ranks: int, share: int
) -> None:
    assert largest_share(nodes, ranks) == share


def test_out_of_memory_is_said_in_sizes() -> None:
    config = base_trial(tiny_study(memory_limit="128MiB"), 128 * 2**20)
    cpu = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8388608 bytes. Error code 12"
    assert memory_reason(cpu, config) == "out_of_memory: 8 MiB more did not fit into the limit of 128 MiB"
    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB"
    on_device = config.model_copy(update={"memory_limit_bytes": None})
    assert memory_reason(cuda, on_device) == "out_of_memory: 2.50 GiB more did not fit into the device"
