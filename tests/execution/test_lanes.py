"""The Dispatcher without Ray, lane state by lane state: it is an asyncio object, and a lane is whoever takes from it.

The states are those of `LaneState`; docs/architecture.md draws them.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from batchscout.orchestrator.execution import dispatcher as dispatcher_module
from batchscout.orchestrator.execution.controller import blame_for
from batchscout.orchestrator.execution.dispatcher import MAX_STARTS, Dispatcher
from batchscout.orchestrator.execution.ray_private.errors import cause_of
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.messages import Assignment, Blame, Device, FirstLane, HeldLane, Host, Message
from batchscout.trainers.notices import NoticeKind


def assignment(trial_id: str = "a", key: str = "") -> Assignment:
    return Assignment(trial_id, "{}", f"/nowhere/{trial_id}", "token", key=key or trial_id)


async def running(dispatcher: Dispatcher, trial_id: str = "a", lane: str = "lane", group: str = "group") -> None:
    """A trial is assigned, and the lane takes it."""
    await dispatcher.assign(assignment(trial_id))
    assert await dispatcher.take(lane, group, 1) == assignment(trial_id)


@pytest.fixture(autouse=True)
def no_time_between_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "SECONDS_BEFORE_THE_LAST_START", 0.0)


async def taken(dispatcher: Dispatcher, lane: str, group: str, turn: int = 1) -> Assignment:
    following = await dispatcher.take(lane, group, turn)
    assert following is not None
    return following


async def told(dispatcher: Dispatcher, key: str = "a") -> Message:
    """Return the next message that is no notice: of a death that a trial survives it tells in one."""
    while (message := await dispatcher.next_message(key)).notice is not None:
        pass
    return message


async def lose(dispatcher: Dispatcher, lane: str, cause: str, said: str = "run_lost", blame: Blame = "machine") -> None:
    """Its Train runs, or its processes, end one after another."""
    for _ in range(MAX_STARTS):
        await getattr(dispatcher, said)(lane, cause, blame)


class TestStarting:
    @pytest.mark.parametrize("said", ["group_died", "run_lost"])
    async def test_the_last_start_waits_for_what_may_pass_and_the_end_of_a_study_for_no_start(
        self, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher_module, "SECONDS_BEFORE_THE_LAST_START", 0.2)
        dispatcher = Dispatcher(num_lanes=1)
        lost = getattr(dispatcher, said)
        seconds = []
        for _ in range(MAX_STARTS):
            began = time.monotonic()
            await lost("lane", "no space left on device", "machine")
            seconds.append(time.monotonic() - began)
        assert seconds[0] < 0.2 <= seconds[1]
        assert seconds[2] < 0.2, "it is given up"
        monkeypatch.setattr(dispatcher_module, "SECONDS_BEFORE_THE_LAST_START", 3600.0)
        await lost("another", "no space left on device", "machine")
        waiting = asyncio.create_task(lost("another", "no space left on device", "machine"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await dispatcher.close()
        await waiting

    async def test_what_the_lanes_run_on_is_known_when_the_first_is_up_and_never_where_none_comes(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        asked = asyncio.create_task(dispatcher.first_lane())
        await dispatcher.introduce("lane", Host("a", "a GPU, 80 GB", 0, free_bytes=79))
        await dispatcher.introduce("lane", Host("b", "a GPU, 80 GB", 0, free_bytes=20), rank=1)
        await running(dispatcher)
        assert await asked == FirstLane("a GPU, 80 GB", num_nodes=2, free_bytes=20)
        without = Dispatcher(num_lanes=1)
        asked = asyncio.create_task(without.first_lane())
        await lose(without, "lane", "no GPU")
        assert await asked == FirstLane()

    async def test_a_lane_that_waits_to_be_started_lets_another_have_its_trial(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher_module, "SECONDS_BEFORE_THE_LAST_START", 3600.0)
        dispatcher = Dispatcher(num_lanes=2)
        await running(dispatcher)
        await dispatcher.group_died("lane", "rank 0 was killed by SIGABRT", "trial")
        waiting = asyncio.create_task(dispatcher.group_died("lane", "no space left on device", "trial"))
        assert (await taken(dispatcher, "other lane", "other group")).trial_id == "a"
        assert not waiting.done()
        await dispatcher.close()
        await waiting

    async def test_a_node_that_took_its_lane_with_it_counts_once_against_the_lane(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        for _ in range(MAX_STARTS - 1):
            await dispatcher.group_died("lane", "its node has died", "machine")
            assert await dispatcher.run_lost("lane", "no node to start on", "machine")

    async def test_a_lane_that_the_cluster_has_no_room_for_is_never_given_up_and_its_trial_goes_to_another(
        self,
    ) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await running(dispatcher)
        await dispatcher.group_died("lane", "rank 0: its node has died", "machine")
        for _ in range(2 * MAX_STARTS):
            assert await dispatcher.no_room("lane")
        last = await dispatcher.next_message("a")
        assert (last.outcome, last.reason) == ("interrupted", "rank 0: its node has died")
        await dispatcher.assign(assignment("b"))
        assert await dispatcher.take("other lane", "other group", 1) == assignment("b")
        await dispatcher.assign(assignment("c"))
        assert await dispatcher.take("lane", "later group", 1) == assignment("c"), "its node is back"
        await dispatcher.close()
        assert not await dispatcher.no_room("lane")


H100 = Device("NVIDIA H100", 80 << 30, is_gpu=True)
H100_ALMOST = Device("NVIDIA H100", (80 << 30) - (1 << 30), is_gpu=True)
HALF = Device("NVIDIA H100", 40 << 30, is_gpu=True)


def on(device: Device, node: str = "a") -> Host:
    return Host(node, str(device), 0, hardware=device)


class TestAnotherKindOfDevice:
    async def test_a_lane_with_a_rank_on_another_kind_of_gpu_runs_nothing_and_its_train_run_is_not_started_again(
        self,
    ) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await dispatcher.introduce("lane", on(H100))
        await dispatcher.introduce("lane", on(H100_ALMOST), rank=1)
        await dispatcher.introduce("other", on(H100))
        await dispatcher.introduce("other", on(HALF, "b"), rank=1)
        await dispatcher.assign(assignment())
        assert await dispatcher.take("other", "its group", 1) is None, "its ranks go home"
        assert await dispatcher.follow("other", "its group", 1) is None
        assert not await dispatcher.run_lost("other", "its ranks have ended", "machine")
        assert await dispatcher.take("lane", "group", 1) == assignment()
        assert await dispatcher.given_up() == [
            "its rank 1 runs on NVIDIA H100 (40 GiB) of b, and the study measures on NVIDIA H100 (80 GiB): measurements of one "
            "kind of GPU are not valid for another"
        ]

    async def test_a_study_that_goes_on_measures_on_what_it_has_measured_on_whichever_lane_comes_first(self) -> None:
        dispatcher = Dispatcher(num_lanes=2, measured_on=H100)
        await dispatcher.introduce("lane", on(HALF))
        assert await dispatcher.take("lane", "group", 1) is None
        asked = asyncio.create_task(dispatcher.first_lane())
        await dispatcher.introduce("other", on(H100))
        await running(dispatcher, lane="other", group="other group")
        assert (await asked).hardware == H100

    async def test_where_no_lane_has_the_right_kind_every_trial_ends_with_the_reason(self) -> None:
        dispatcher = Dispatcher(num_lanes=1, measured_on=H100)
        await dispatcher.assign(assignment())
        await dispatcher.introduce("lane", on(HALF))
        last = await dispatcher.next_message("a")
        assert last.outcome == "no_lane"
        assert "its rank 0 runs on NVIDIA H100 (40 GiB) of a" in last.reason
        assert await dispatcher.first_lane() == FirstLane()

    async def test_a_trial_that_the_right_kind_has_begun_goes_on_elsewhere(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await dispatcher.introduce("lane", on(H100))
        await running(dispatcher)
        await dispatcher.group_died("lane", "its node has died", "machine")
        await dispatcher.introduce("lane", on(HALF, "b"))
        assert (await dispatcher.next_message("a")).outcome == "interrupted"

    async def test_cpus_of_several_kinds_run_trials(self) -> None:
        dispatcher = Dispatcher(num_lanes=2, measured_on=Device("a CPU", 1 << 30))
        await dispatcher.introduce("lane", on(Device("another CPU", 1 << 30)))
        await dispatcher.assign(assignment("a"))
        assert await taken(dispatcher, "lane", "group") == assignment("a")

    async def test_a_message_says_what_each_rank_runs_on_and_once_where_that_is_the_same(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        for lane, second in [("lane", on(H100, "a")), ("other", on(H100_ALMOST, "b"))]:
            await dispatcher.introduce(lane, on(H100, "a"))
            await dispatcher.introduce(lane, second, rank=1)
            await running(dispatcher, trial_id=lane, lane=lane, group=lane)
            await dispatcher.say(lane, Message())
        assert (await dispatcher.next_message("lane")).lane == HeldLane(0, "a", (H100,))
        assert (await dispatcher.next_message("other")).lane == HeldLane(1, "a", (H100, H100_ALMOST), ("a", "b"))


class TestIdle:
    async def test_an_assignment_reaches_every_rank_of_the_lane_that_took_it(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.assign(assignment())
        taken = await dispatcher.take("lane", "group", 1)
        assert taken == await dispatcher.follow("lane", "group", 1) == assignment()

    async def test_a_group_that_dies_idle_does_not_take_what_its_successor_is_to_have(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        dead = asyncio.create_task(dispatcher.take("lane", "first group", 1))
        await asyncio.sleep(0)
        alive = asyncio.create_task(dispatcher.take("lane", "second group", 1))
        await asyncio.sleep(0)
        await dispatcher.assign(assignment())
        assert await alive == assignment()
        assert await dead is None

    @pytest.mark.parametrize("said", ["group_died", "run_lost", "no_room"])
    async def test_nor_does_it_while_it_has_no_successor_yet(self, said: str) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        dead = asyncio.create_task(dispatcher.take("lane", "first group", 1))
        await asyncio.sleep(0)
        await getattr(dispatcher, said)("lane", *(() if said == "no_room" else ("rank 0: killed", "trial")))
        await dispatcher.assign(assignment())
        assert await dead is None
        assert await dispatcher.take("lane", "second group", 1) == assignment(), "without a death"

    async def test_the_other_ranks_of_a_dead_group_are_not_left_waiting(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        idle = asyncio.create_task(dispatcher.take("lane", "first group", 1))
        following = asyncio.create_task(dispatcher.follow("lane", "first group", 1))
        early = asyncio.create_task(dispatcher.follow("lane", "second group", 1))
        await asyncio.sleep(0)
        successor = asyncio.create_task(dispatcher.take("lane", "second group", 1))
        assert await following is None
        assert await idle is None
        await dispatcher.assign(assignment())
        assert await successor == await early == assignment()

    async def test_what_wants_fresh_processes_is_given_back_without_a_death_and_is_the_next_one_again(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.assign(assignment("a"))
        await dispatcher.assign(assignment("b"))
        await dispatcher.take("lane", "group", 2)
        ending = asyncio.create_task(dispatcher.until_freed("lane", "a"))
        await dispatcher.give_back("lane", "a")
        await ending
        assert await dispatcher.take("lane", "other group", 1) == assignment("a")
        await dispatcher.freed("lane")
        await dispatcher.take("lane", "other group", 2)
        await dispatcher.dismiss("b")
        await dispatcher.give_back("lane", "b")
        await dispatcher.assign(assignment("c"))
        assert (await taken(dispatcher, "lane", "third group")).trial_id == "c", "nobody wants b any more"

    async def test_closing_sends_idle_ranks_home(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        idle = asyncio.create_task(dispatcher.take("lane", "group", 1))
        await asyncio.sleep(0)
        assert await dispatcher.heartbeat("lane") == "go on"
        await dispatcher.close()
        assert await idle is None
        assert await dispatcher.heartbeat("lane") == "closed"


class TestRunning:
    async def test_a_trial_that_says_nothing_for_too_long_fails_and_its_lane_is_told_to_end(self) -> None:
        dispatcher = Dispatcher(num_lanes=1, max_silent_seconds=0)
        assert await dispatcher.heartbeat("lane") == "go on", "nothing to say"
        await running(dispatcher)
        assert await dispatcher.heartbeat("lane") == "hung"
        last = await dispatcher.next_message("a")
        assert last.reason.startswith("it said nothing for 0 s, longer than kill.max")
        await dispatcher.until_freed("lane", "a")
        await dispatcher.group_died("lane", "rank 0 exited with status 1", "trial", [0])
        await dispatcher.introduce("lane", Host("a", "", 0))
        await dispatcher.assign(assignment("b"))
        following = await taken(dispatcher, "lane", "next group")
        await dispatcher.say("b", Message(outcome="complete"))
        assert (await dispatcher.next_message("b")).notice is None, "nobody is told of an end that was asked for"
        assert (following.trial_id, following.lane_deaths) == ("b", 0)

    async def test_every_word_ends_a_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 0.0
        monkeypatch.setattr(dispatcher_module, "time", SimpleNamespace(monotonic=lambda: now))
        dispatcher = Dispatcher(num_lanes=1, max_silent_seconds=10)
        await running(dispatcher)
        for _ in range(3):
            now += 9
            assert await dispatcher.heartbeat("lane") == "go on"
            await dispatcher.say("a", Message())
        now += 11
        assert await dispatcher.heartbeat("lane") == "hung"

    async def test_without_a_limit_no_silence_is_too_long(self) -> None:
        patient = Dispatcher(num_lanes=1)
        await running(patient)
        assert await patient.heartbeat("lane") == "go on"

    async def test_the_other_ranks_end_only_when_rank_0_has_said_its_last_word(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher)
        ending = asyncio.create_task(dispatcher.until_freed("lane", "a"))
        await dispatcher.say("a", Message(outcome="complete"))
        await asyncio.sleep(0)
        assert not ending.done()
        await dispatcher.freed("lane")
        await ending

    async def test_the_last_word_of_a_paused_trial_is_not_taken_for_that_of_its_continuation(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await dispatcher.assign(assignment(key="first"))
        await dispatcher.dismiss("first")
        await dispatcher.assign(assignment(key="second"))
        assert await dispatcher.say("first", Message(outcome="stopped")) == "stop"
        assert await dispatcher.say("second", Message(metrics={"samples_seen": 8})) == "go on"
        assert (await dispatcher.next_message("second")).metrics == {"samples_seen": 8}

    async def test_a_trial_whose_relay_was_lost_is_left_by_its_lane_before_another_takes_it(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await dispatcher.assign(assignment(key="lost"))
        await dispatcher.take("first lane", "group", 1)
        await dispatcher.assign(assignment(key="again"))
        taking = asyncio.create_task(dispatcher.take("second lane", "other group", 1))
        await asyncio.sleep(0)
        assert await dispatcher.say("lost", Message(metrics={"samples_seen": 8})) == "stop"
        assert not taking.done(), "the first lane saves a checkpoint now"
        await dispatcher.freed("first lane")
        assert await taking == assignment(key="again")

    async def test_dismissing_all_lasts_until_every_lane_has_saved_and_let_go(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await running(dispatcher, "a", "first lane", "group")
        await running(dispatcher, "b", "second lane", "other group")
        dismissing = asyncio.create_task(dispatcher.dismiss_all())
        await asyncio.sleep(0)
        for trial_id, lane in (("a", "first lane"), ("b", "second lane")):
            assert not dismissing.done()
            assert await dispatcher.say(trial_id, Message(metrics={"samples_seen": 8})) == "stop"
            await dispatcher.freed(lane)
            await asyncio.sleep(0)
        await dismissing


class TestAwaitingItsVerdict:
    async def test_asking_for_the_next_message_lets_a_waiting_rank_go_on_and_dismissing_stops_it(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        for verdict in ("go on", "stop"):
            await dispatcher.assign(assignment())
            asking = asyncio.create_task(dispatcher.ask("a", Message(rungs=(4,))))
            assert (await dispatcher.next_message("a")).rungs == (4,)
            assert not asking.done(), "a rank waits at a rung until the driver has spoken"
            if verdict == "go on":
                waiting = asyncio.create_task(dispatcher.next_message("a"))
                assert await asking == "go on"
                waiting.cancel()
            else:
                await dispatcher.dismiss("a")
                assert await asking == "stop"

    async def test_a_verdict_is_not_given_before_the_question_is_read(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.assign(assignment())
        await dispatcher.say("a", Message(metrics={"samples_seen": 1}))
        asking = asyncio.create_task(dispatcher.ask("a", Message(rungs=(4,))))
        await asyncio.sleep(0)
        assert (await dispatcher.next_message("a")).metrics == {"samples_seen": 1}
        assert (await dispatcher.next_message("a")).rungs == (4,)
        await asyncio.sleep(0)
        assert not asking.done(), "the driver has read it only now"
        waiting = asyncio.create_task(dispatcher.next_message("a"))
        assert await asking == "go on"
        waiting.cancel()

    async def test_waiting_for_it_is_no_silence(self) -> None:
        dispatcher = Dispatcher(num_lanes=1, max_silent_seconds=0)
        await running(dispatcher)
        asked = asyncio.create_task(dispatcher.ask("a", Message()))
        await dispatcher.next_message("a")
        assert await dispatcher.heartbeat("lane") == "go on"
        await dispatcher.dismiss("a")
        assert await asked == "stop"
        assert await dispatcher.heartbeat("lane") == "hung", "told to stop, it must say that it has"

    async def test_a_verdict_reaches_a_rank_that_is_told_to_end_as_stop(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher)
        await dispatcher.heartbeat("lane", leaving=True)
        waiting = asyncio.create_task(dispatcher.ask("a", Message(evaluated=True)))
        assert (await dispatcher.next_message("a")).evaluated
        following = asyncio.create_task(dispatcher.next_message("a"))
        assert await waiting == "stop"
        await dispatcher.say("a", Message(outcome="stopped"))
        assert (await following).outcome == "interrupted"


class TestDyingUnderATrial:
    """From running back to starting: the processes are gone, and the trial is dealt with when that is certain."""

    async def test_the_trial_comes_again_once_and_then_fails_with_the_cause(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher, group="first group")
        again = await taken(dispatcher, "lane", "second group")
        assert (again.trial_id, again.lane_deaths) == ("a", 1)
        await dispatcher.group_died("lane", "rank 0: killed", "trial")
        await dispatcher.assign(assignment("b"))
        assert (await taken(dispatcher, "lane", "third group")).trial_id == "b", "the next trial is served"
        last = await told(dispatcher)
        assert last.outcome == "failed"
        assert last.reason == "it ended its lane 2 times; last: rank 0: killed"

    @pytest.mark.parametrize(
        ("last", "outcome"),
        [(Host("a", "", 6), "out_of_memory"), (Host("a", "", 5), "failed"), (Host("b", "", 9), "failed")],
    )
    async def test_a_process_that_the_kernel_ended_for_want_of_memory_ran_out_of_memory(
        self, last: Host, outcome: str
    ) -> None:
        """The lane comes up on these hosts, one after another, and dies under its trial each time."""
        dispatcher, hosts = Dispatcher(num_lanes=1), (Host("a", "", 5), Host("a", "", 5), last)
        await dispatcher.assign(assignment())
        for turn, host in enumerate(hosts, start=1):
            await dispatcher.introduce("lane", host)
            if turn < len(hosts):
                await dispatcher.take("lane", f"group {turn}", 1)
        await dispatcher.assign(assignment("next"))
        await dispatcher.take("lane", "last group", 1)
        ended = await told(dispatcher)
        assert ended.outcome == outcome
        assert (ended.cause is Cause.HOST_MEMORY) == (outcome == "out_of_memory")

    async def test_so_did_one_that_rays_memory_monitor_ended(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.assign(assignment())
        for group in ("first", "second", "third"):
            await dispatcher.assign(assignment("next"))
            await dispatcher.take("lane", group, 1)
            await dispatcher.group_died("lane", "rank 0: killed", "memory")
        ended = await told(dispatcher)
        assert ended.outcome == "out_of_memory"
        assert "the host ran out of memory and ended its process; lower memory_limit" in ended.reason

    async def test_a_lane_whose_train_run_is_lost_gets_another_and_its_trial_waits(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher)
        assert await dispatcher.run_lost("lane", "ActorDiedError: the controller", "machine")
        last = await told(dispatcher)
        assert (last.outcome, last.reason) == ("interrupted", "ActorDiedError: the controller")
        await dispatcher.assign(assignment(key="again"))
        again = await taken(dispatcher, "lane", "next group")
        assert (again.trial_id, again.lane_deaths) == ("a", 0), "it is not at fault"

    async def test_a_train_run_that_went_with_its_starved_process_counts_as_a_death_under_its_trial(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.assign(assignment())
        for group in ("first", "second"):
            await dispatcher.take("lane", group, 1)
            assert await dispatcher.run_lost("lane", "ControllerError: killed", "memory")
        assert (await told(dispatcher)).outcome == "out_of_memory"

    async def test_a_trial_that_is_no_longer_wanted_does_not_come_again(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher)
        await dispatcher.dismiss("a")
        await dispatcher.group_died("lane", "rank 0: killed", "trial")
        await dispatcher.assign(assignment("b"))
        assert await dispatcher.take("lane", "second group", 1) == assignment("b")

    async def test_the_cause_of_an_earlier_death_is_not_told_of_a_later_one(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await running(dispatcher, lane="first lane")
        await dispatcher.no_room("first lane")
        await dispatcher.group_died("second lane", "rank 0: fresh processes for the next trial", "trial")
        assert (await taken(dispatcher, "second lane", "group")).lane_deaths == 1
        await dispatcher.no_room("second lane")
        assert (await told(dispatcher)).reason.endswith("last: its processes died without a message")

    @pytest.mark.parametrize("blame", ["trial", "memory"])
    async def test_it_tells_of_a_death_that_it_survives(self, blame: Blame) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.introduce("lane", Host("a", "", 0, process_id=4711))
        await running(dispatcher)
        await dispatcher.group_died("lane", "rank 0: killed", blame, [0])
        await dispatcher.introduce("lane", Host("a", "", 0, process_id=4712))
        await taken(dispatcher, "lane", "second group")
        notice = (await dispatcher.next_message("a")).notice
        assert notice is not None
        assert notice.kind is NoticeKind.LANE_DIED
        cause = {"trial": "rank 0: killed", "memory": "the host ran out of memory and ended one"}[blame]
        assert notice.text.startswith(f"its lane's process 4711 died: {cause}; ")

    @pytest.mark.parametrize(
        ("lost", "blame", "leaving", "is_told"),
        [
            ([0], "trial", False, True),
            ([], "trial", False, False),  # it ended itself, since the next trial wants fresh processes
            ([0], "machine", False, False),
            ([0], "trial", True, False),
        ],
    )
    async def test_of_processes_that_die_between_two_trials_the_next_one_tells(
        self, lost: list[int], blame: Blame, leaving: bool, is_told: bool
    ) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher)
        await dispatcher.say("a", Message(outcome="complete"))
        await dispatcher.freed("lane")
        await dispatcher.heartbeat("lane", leaving=leaving)
        await dispatcher.group_died("lane", "rank 0: killed", blame, lost)
        await dispatcher.introduce("lane", Host("a", "", 0))
        await running(dispatcher, "b", group="second group")
        await dispatcher.say("b", Message(outcome="complete"))
        notice = (await dispatcher.next_message("b")).notice
        assert (notice is not None) == is_told
        assert notice is None or "rank 0: killed" in notice.text

    @pytest.mark.parametrize(
        ("said", "blame"),
        [
            ("Task was killed due to the node running low on memory.", "memory"),
            ("The actor died unexpectedly before finishing this task: its node has died.", "machine"),
            ("ValueError: my own mistake", "trial"),
        ],
    )
    def test_who_is_to_blame_is_read_from_what_ray_says(self, said: str, blame: str) -> None:
        assert blame_for(said) == blame

    def test_of_a_process_that_does_not_answer_is_said_what_that_means(self) -> None:
        nowhere = ActorUnavailableError("RpcError: Connection reset by peer rpc_code: 14", actor_id=None)
        assert (
            cause_of(WorkerHealthCheckFailedError("a health check failed", nowhere))
            == "its process could not be reached"
        )
        assert cause_of(ValueError("\nmy own mistake\nand more")) == "my own mistake"


class TestLeaving:
    async def test_a_trial_whose_processes_are_told_to_end_stops_and_waits_for_others(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher)
        assert await dispatcher.say("a", Message()) == "go on"
        assert await dispatcher.heartbeat("lane", leaving=True) == "go on", "it has time to save"
        assert await dispatcher.say("a", Message(metrics={"samples_seen": 8})) == "stop"
        assert await dispatcher.say("a", Message(outcome="stopped")) == "stop"
        await dispatcher.freed("lane")
        last = [await dispatcher.next_message("a") for _ in range(3)][-1]
        assert (last.outcome, last.reason) == ("interrupted", "its processes were told to end")
        await dispatcher.assign(assignment("b"))
        assert await dispatcher.take("lane", "group", 2) is None, "nothing begins there any more"
        assert await dispatcher.follow("lane", "group", 2) is None
        await dispatcher.introduce("lane", Host("a", "", 0))
        assert await dispatcher.take("lane", "new group", 1) == assignment("b")

    async def test_who_is_killed_after_being_told_to_end_has_not_died_of_its_trial(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await running(dispatcher)
        await dispatcher.heartbeat("lane", leaving=True)
        await dispatcher.group_died("lane", "rank 0: killed", "trial")
        await dispatcher.introduce("lane", Host("a", "", 0))
        await dispatcher.assign(assignment("b"))
        await dispatcher.take("lane", "new group", 1)
        assert (await dispatcher.next_message("a")).outcome == "interrupted"

    async def test_processes_that_are_told_to_end_while_they_are_idle_take_nothing_more(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        idle = asyncio.create_task(dispatcher.take("lane", "group", 1))
        await asyncio.sleep(0)
        await dispatcher.heartbeat("lane", leaving=True)
        assert await idle is None

    async def test_a_trial_that_does_not_stop_there_is_ended_by_its_silence(self) -> None:
        dispatcher = Dispatcher(num_lanes=1, max_silent_seconds=0)
        await running(dispatcher)
        assert await dispatcher.heartbeat("lane", leaving=True) == "hung"
        assert (await dispatcher.next_message("a")).outcome == "failed"


class TestGivenUp:
    async def test_a_lane_whose_train_runs_end_before_they_take_a_trial_is_given_up(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        again = [await dispatcher.run_lost("lane", "no shared memory", "machine") for _ in range(3)]
        assert again == [True, True, False]
        await dispatcher.assign(assignment())
        assert (await dispatcher.next_message("a")).outcome == "no_lane"

    async def test_a_lane_that_never_comes_up_is_given_up_with_its_reason(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.assign(assignment())
        for _ in range(2):
            await dispatcher.group_died("lane", "rank 0: no shared memory", "trial")
        await dispatcher.take("lane", "group", 1)  # it came up after all: the count begins anew
        waiting = asyncio.create_task(told(dispatcher))
        for _ in range(3):
            assert not waiting.done()
            await dispatcher.group_died("lane", "rank 0: no shared memory", "trial")
            await asyncio.sleep(0)
        last = await waiting
        assert last.outcome == "no_lane"
        assert "its processes ended 3 times before they took a trial: rank 0: no shared memory" in last.reason

    @pytest.mark.parametrize("said", ["group_died", "run_lost"])
    async def test_its_trial_goes_to_another_lane(self, said: str) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await running(dispatcher, lane="first lane")
        await lose(dispatcher, "first lane", "its node is gone", said, "trial")
        assert (await taken(dispatcher, "second lane", "other group")).trial_id == "a"

    async def test_it_is_given_trials_if_it_comes_up_after_all(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await lose(dispatcher, "lane", "rank 0: no shared memory", "group_died", "trial")
        await running(dispatcher)
        assert await dispatcher.say("a", Message()) == "go on"
        assert not await dispatcher.run_lost("lane", "once more", "machine"), "but the study does not count on it"
        alone = Dispatcher(num_lanes=1)
        await lose(alone, "lane", "rank 0: no shared memory", "group_died", "trial")
        await running(alone)
        assert await alone.say("a", Message()) == "stop", "the driver has been told already that no lane is left"

    async def test_without_lanes_trials_end_at_once_with_what_the_lane_given_up_last_said(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await dispatcher.introduce("first lane", Host("a", "", 0))
        await dispatcher.assign(assignment("before"))
        await lose(dispatcher, "second lane", "no GPU")
        await lose(dispatcher, "first lane", "no space left on device")
        await dispatcher.assign(assignment("after"))
        for trial_id in ("before", "after"):
            last = await dispatcher.next_message(trial_id)
            assert last.outcome == "no_lane"
            assert last.reason.startswith("every lane has failed, the last one because ")
            assert last.reason.endswith(": no space left on device")


class TestReleased:
    async def test_an_idle_lane_goes_home_and_the_next_trial_is_another_lanes(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        for rank in (0, 1):
            await dispatcher.introduce("lane", Host("a", "", 0), rank=rank)
        asked = asyncio.create_task(dispatcher.take("lane", "group", 1))
        followed = asyncio.create_task(dispatcher.follow("lane", "group", 1))
        await asyncio.sleep(0)
        assert await dispatcher.release("lane")
        assert (await asked, await followed) == (None, None)
        assert await dispatcher.heartbeat("lane") == "closed"
        assert await dispatcher.heartbeat("lane", leaving=True) == "closed"
        await running(dispatcher, lane="other", group="other group")
        assert await dispatcher.heartbeat("other") == "go on"

    async def test_no_lane_is_released_that_has_a_trial_or_may_be_about_to_take_one(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        await running(dispatcher)
        assert not await dispatcher.release("lane")
        assert (await dispatcher.lanes())["lane"].idle_seconds is None
        await dispatcher.assign(assignment("b"))
        assert not await dispatcher.release("other"), "which may come up in time for it"
        assert (await taken(dispatcher, "other", "other group")).trial_id == "b"
        freed_at = time.monotonic()
        await dispatcher.freed("lane")
        idle_seconds = (await dispatcher.lanes())["lane"].idle_seconds
        assert idle_seconds is not None
        assert 0 <= idle_seconds <= time.monotonic() - freed_at
        assert await dispatcher.release("lane")

    async def test_one_that_starts_or_waits_for_room_ends_as_soon_as_it_asks(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        assert await dispatcher.release("lane")
        await dispatcher.introduce("lane", Host("a", "", 0))
        assert await dispatcher.take("lane", "group", 1) is None
        assert await dispatcher.release("another")
        assert not await dispatcher.no_room("another")
        assert await dispatcher.release("third")
        assert not await dispatcher.run_lost("third", "its controller died", "machine")

    async def test_however_it_ends_it_is_no_lane_that_was_given_up(self) -> None:
        dispatcher = Dispatcher(num_lanes=1)
        await dispatcher.introduce("lane", Host("a", "", 0))
        assert await dispatcher.release("lane")
        await lose(dispatcher, "lane", "its node has died", "group_died")
        assert await dispatcher.given_up() == []
        await running(dispatcher, lane="a new one")


class TestALostNode:
    async def test_the_trial_of_a_lane_that_has_lost_all_its_processes_goes_on_elsewhere_at_once(self) -> None:
        """Before Ray Train has found room for the lane's next processes, or given up to look for it."""
        dispatcher = Dispatcher(num_lanes=2)
        await dispatcher.introduce("lane", Host("a", "", 0))
        await running(dispatcher)
        await dispatcher.group_died("lane", "rank 0: its node has died", "machine", [0])
        last = await dispatcher.next_message("a")
        assert (last.outcome, last.reason) == ("interrupted", "rank 0: its node has died")
        await running(dispatcher, lane="other", group="other group")

    async def test_while_a_rank_of_it_may_live_no_other_lane_has_it(self) -> None:
        dispatcher = Dispatcher(num_lanes=2)
        for rank, host in enumerate("ab"):
            await dispatcher.introduce("lane", Host(host, "", 0), rank=rank)
        await running(dispatcher)
        await dispatcher.group_died("lane", "rank 1: its node has died", "machine", [1])
        waiting = asyncio.create_task(dispatcher.next_message("a"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await dispatcher.no_room("lane")
        assert (await waiting).outcome == "interrupted"
