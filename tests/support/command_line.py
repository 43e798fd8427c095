"""The program as it is typed, in the test's own process."""

from __future__ import annotations

import pytest

from batchscout.orchestrator.cli import main


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of `batchscout` with these arguments."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    printed, code = capsys.readouterr(), ended.value.code or 0
    assert isinstance(code, int)
    return code, printed.out, printed.err
