"""What Ctrl-C, SIGTERM and SIGHUP do to a program, sent to real processes."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import HANGS_AFTER_SECONDS, next_line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEAD = "import signal, sys, time\nfrom batchscout.orchestrator.signals import *\n"
# Says that it can be stopped, and waits for that.
WAITS = "print('ready', flush=True); time.sleep(60)"


def start(code: str, **options: object) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": settings, **options}
    process: subprocess.Popen[str] = subprocess.Popen([sys.executable, "-c", HEAD + code], **streams)
    return process


def stopped_by(number: signal.Signals, code: str) -> tuple[int, str]:
    """(exit code, output) of a program that gets the signal when it is ready."""
    process = start(code)
    before = [next_line(process)]
    while "ready" not in before[-1] and before[-1]:
        before.append(next_line(process))
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANGS_AFTER_SECONDS)
    return process.returncode, "".join(before) + output


@pytest.mark.parametrize("number", ALL)
def test_each_of_them_is_ctrl_c(number: signal.Signals) -> None:
    code = f"try:\n  with all_are_ctrl_c(): {WAITS}\nexcept KeyboardInterrupt: print('in order'); sys.exit(130)"
    assert stopped_by(number, code) == (130, "ready\nin order\n")


@pytest.mark.parametrize("number", ALL)
def test_what_cannot_be_left_half_done_is_done_first(number: signal.Signals) -> None:
    """Whatever takes SIGTERM for itself meanwhile must be kept from that by other means."""
    work = "print('ready', flush=True); [time.sleep(0.01) for _ in iter(interrupt_has_come, True)]; print('done', flush=True)"
    code = f"try:\n  with interrupts_afterwards(): {work}\nexcept KeyboardInterrupt: sys.exit(130)"
    assert stopped_by(number, code) == (130, "ready\ndone\n")


def test_it_is_an_interrupt_though_the_work_failed_of_the_same_signal() -> None:
    """As where SIGTERM went to all processes of a study, and Ray's are gone first."""
    work = "print('ready', flush=True); [time.sleep(0.01) for _ in iter(interrupt_has_come, True)]; raise RuntimeError('Ray is gone')"
    code = f"try:\n  with interrupts_afterwards():\n    {work}\nexcept KeyboardInterrupt: sys.exit(130)"
    assert stopped_by(signal.SIGTERM, code) == (130, "ready\n")


def test_a_second_signal_does_not_wait() -> None:
    code = f"try:\n  with interrupts_afterwards():\n    signal.raise_signal(signal.SIGINT); {WAITS}\nexcept KeyboardInterrupt: sys.exit(130)"
    assert stopped_by(signal.SIGTERM, code) == (130, "ready\n")


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ("threading.Thread(target=threading.Event().wait, name='prefetcher').start()", "(prefetcher)"),
        ("futures.ThreadPoolExecutor(1).submit(threading.Event().wait)", "(ThreadPoolExecutor-0_0)"),
        ("multiprocessing.Process(target=time.sleep, args=(60,), name='server').start()", "(server)"),
        ("atexit.register(threading.Event().wait)", "(atexit)"),
    ],
)
def test_what_waits_for_ever_at_the_end_is_left_with_its_name(waits: str, named: str) -> None:
    own = f"import atexit, multiprocessing, threading\nfrom concurrent import futures\nsignals.SECONDS_TO_LEAVE = 0.5\n{waits}\n"
    code = f"from batchscout.orchestrator import signals\nfrom batchscout.trainers.descendants import adopt_orphans\nadopt_orphans()\nall_are_ctrl_c_until_the_end()\n{own}leave_on_signals(3); sys.exit(3)"
    process = start(code, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=HANGS_AFTER_SECONDS)
        assert (process.returncode, named in output) == (3, True), output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_hangup_that_is_to_be_ignored_is_ignored() -> None:
    """As nohup has it."""
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nwith all_are_ctrl_c(): print('ready', flush=True); time.sleep(0.5)\nprint('went on')"
    assert stopped_by(signal.SIGHUP, code) == (0, "ready\nwent on\n")


def test_a_program_whose_terminal_was_closed_still_ends_in_order() -> None:
    """Printing to it would be an error, which would hide the interrupt."""
    ours, theirs = pty.openpty()
    body = f"try:\n  with all_are_ctrl_c(): {WAITS}\nexcept KeyboardInterrupt:\n  print('stopped', flush=True); sys.exit(130)"
    take_terminal = "import fcntl, os, termios; os.setsid(); fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
    process = start(take_terminal + body, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100).startswith(b"ready")
    os.close(ours)  # the kernel sends SIGHUP now
    assert process.wait(HANGS_AFTER_SECONDS) == 130


def test_a_program_that_is_stuck_where_no_handler_runs_is_left_all_the_same() -> None:
    """A library's own code, here the C library's, goes on after a signal and does not come back."""
    stuck = "ctypes.CDLL(None).system(b'echo ready; exec sleep 20 > /dev/null 2>&1')"
    code = (
        "import ctypes, os\n"
        "with all_are_ctrl_c(), left_if_stuck(0.2, lambda: os._exit(130)):\n"
        f"  signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}}); {stuck}"
    )
    assert stopped_by(signal.SIGTERM, code) == (130, "ready\n")


def test_what_ends_in_time_after_a_signal_is_not_left() -> None:
    work = "print('ready', flush=True); [time.sleep(0.01) for _ in iter(interrupt_has_come, True)]"
    code = (
        "import os\ntry:\n"
        f"  with left_if_stuck({HANGS_AFTER_SECONDS}, lambda: os._exit(1)), interrupts_afterwards(): {work}\n"
        "except KeyboardInterrupt: sys.exit(130)"
    )
    assert stopped_by(signal.SIGTERM, code) == (130, "ready\n")


# Registers what it does at the end when the program has begun, as Ray and torch do.
LIBRARY = f"""
def wait(): {WAITS}
class Stream:
    def __getattr__(self, name): return getattr(sys.stdout, name)
    def write(self, text):
        atexit.unregister(wait)
        atexit.register(wait)
        return sys.stdout.write(text)
sys.stderr = Stream()
"""


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize(
    "leaving",
    [
        LIBRARY,
        f"sys.stderr = sys.stdout\ndef wait(): threading.main_thread().join(); {WAITS}\nthreading.Thread(target=wait).start()",
    ],
    ids=["libraries", "threads"],
)
def test_one_that_comes_while_the_interpreter_shuts_down_changes_no_exit_code(
    leaving: str, number: signal.Signals, tmp_path: Path
) -> None:
    """As Ray and torch take a while to leave, and threads are waited for even before them."""
    verb = f"sys.argv = ['batchscout', 'report', {str(tmp_path)!r}]\nfrom batchscout.orchestrator.cli import program\nprogram()"
    code, output = stopped_by(number, f"import atexit, threading\n{leaving}\n{verb}")
    assert (code, output.splitlines()[-1]) == (2, "ready")
    assert output.startswith("batchscout: "), "nothing that was said is lost"


@pytest.mark.parametrize("number", ALL)
def test_one_that_comes_when_nothing_listens_any_more_changes_no_exit_code(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The interpreter gives signals their default action again before it destroys what is left."""
    destroyed = (
        f"class Last:\n  def __del__(self, kill=os.kill, own=os.getpid()): kill(own, {int(number)})\nlast = Last()"
    )
    verb = f"sys.argv = ['batchscout', 'report', {str(tmp_path)!r}]\nfrom batchscout.orchestrator.cli import program\nprogram()"
    process = start(f"import os\n{destroyed}\n{verb}")
    output, _ = process.communicate(timeout=HANGS_AFTER_SECONDS)
    assert process.returncode == 2, output
