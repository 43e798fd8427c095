"""What Ray reads from the environment."""

from __future__ import annotations

DRIVER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the journal is what a study goes on from
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a banner at every verbosity
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the ranks look for themselves
    "RAY_process_group_cleanup_enabled": "1",  # what a user's code has started in a rank that is killed ends with it
    "RAY_worker_niceness": "0",  # with Ray's default of 15 anything else on the host slows down what is being timed
}
"""For the driver and the cluster that it starts."""

RANK_ENVIRONMENT = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
"""For the processes of a study: a print of the user's is not to go through Train's logger."""

LANE_ENVIRONMENT = {
    # Train asks its workers this often how they are; its default of 2 s would be the price of every recycled lane.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Train waits this long for room, four times, before it says NO_ROOM; an autoscaler sees what it asks for.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "6",
    # Train would change to a folder of its own. Without that ranks are where Ray has put the files that the study ships.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
"""For the driver whose lanes are opened."""


def relay_environment(num_lanes: int) -> dict[str, str]:
    """Return the variable that lets a relay for every lane start at once: by itself Tune starts them one by one."""
    return {"TUNE_MAX_PENDING_TRIALS_PG": str(num_lanes)}
