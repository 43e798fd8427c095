"""What all tests share: a cache of their own, and one Ray cluster for each process that runs tests."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchscout.orchestrator.cli import main
from batchscout.orchestrator.config.keys import StudyConfig
from tests.support.command_line import Typed
from tests.support.processes import HANGS_AFTER_SECONDS

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch, not imported yet: each core already has a test of its own
for _of_the_window in ("COLUMNS", "LINES"):
    os.environ.pop(_of_the_window, None)  # what a test reads is a log, whatever window the tests are started in

SEEN_BY = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that do not ask for one, before torch or Ray looks: the same tests then run on every machine."""
    if not asks_for_a_gpu(config):
        os.environ.update(dict.fromkeys(SEEN_BY, ""))
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as lanes have it: torch looks for it only once


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _longest_first(items)
    if not asks_for_a_gpu(config):
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="it needs a GPU: pytest -m cuda -n 0"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own; one that waits for what never comes fails instead of hanging."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=HANGS_AFTER_SECONDS))
    return True


def _longest_first(items: list[pytest.Item]) -> None:
    """Put the files first that have tests with a time limit of their own, the longest ahead, and then those with the most tests: minutes,
    which as the last would run alone beside an idle worker."""
    seconds, number = dict[Path, float](), Counter(item.path for item in items)
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds[item.path] = max(seconds.get(item.path, 0.0), marker.args[0] if marker else 0.0)
    items.sort(key=lambda item: (-seconds[item.path], -number[item.path]))


def asks_for_a_gpu(config: pytest.Config) -> bool:
    return re.search(r"(?<!not )\bcuda\b", str(config.getoption("markexpr"))) is not None


@pytest.fixture(scope="session", autouse=True)
def _what_tests_start_hears_hangups() -> None:
    """Under nohup SIGHUP is ignored, and so it would be by every program that a test starts. A handler is not passed
    on."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of tokenized text and of measurements that no other session touches; set before any other fixture runs."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHSCOUT_CACHE", str(folder))
        yield folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("BATCHSCOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory, entered."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name, for the sake of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Calls the program as it is typed, in this process."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        printed, code = capsys.readouterr(), ended.value.code or 0
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory, data_cache: Path) -> Iterator[None]:
    """Two CPUs on this machine, whatever it has."""
    import ray

    from batchscout.orchestrator.execution.session import start_ray

    study = StudyConfig.model_validate(
        {"name": "session", "model": {"target": "gpt"}, "data": {"target": "python_stdlib"}}
    )
    start_ray(study, None, tmp_path_factory.mktemp("ray"), num_cpus=2)
    yield
    ray.shutdown()
