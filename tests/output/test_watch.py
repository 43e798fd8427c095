"""A status that is watched is shown again when something has changed, and not otherwise."""

from batchscout.orchestrator.output.watch import watch


def test_each_state_is_shown_once_until_the_study_is_over() -> None:
    states = iter("aabbbc")
    seen, shown = [], []

    def state() -> str:
        seen.append(next(states))
        return seen[-1]

    def show() -> bool:
        shown.append(seen[-1])
        return seen[-1] == "c"

    watch(show, state, seconds=0)
    assert shown == ["a", "b", "c"]
    assert next(states, None) is None
