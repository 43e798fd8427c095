"""One Ray cluster for the whole session, started as a study starts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.config.keys import StudyConfig


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of tokenized text that no other session touches."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_data_cache(data_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHSCOUT_CACHE", str(data_cache))


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory, data_cache: Path) -> Iterator[None]:
    """Two CPUs on this machine, whatever it has."""
    import ray

    from orchestrator.execution.session import start_ray

    study = StudyConfig.model_validate(
        {"name": "session", "model": {"target": "gpt"}, "data": {"target": "python_stdlib"}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHSCOUT_CACHE", str(data_cache))
        start_ray(study, None, tmp_path_factory.mktemp("ray"), num_cpus=2)
    yield
    ray.shutdown()
