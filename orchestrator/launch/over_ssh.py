"""A study on the cluster of a file for `ray up`: started if it is not there yet, sent this clone, and given the study over SSH.

Ray's launcher joins the words of a command with spaces, and a shell on the head reads them. So the words are quoted for that one
shell, and each of Ray's commands is started from a list, which no shell of this machine reads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from batchscout.orchestrator.launch import RAY
from batchscout.trainers.files import own_file, quoted

CLONE = "batchscout"
"""The clone in the home folder of the cluster's nodes: the file_mounts of cluster.yaml."""


@dataclass(frozen=True)
class SentStudy:
    """What is to run on which cluster. Raises ValueError where the cluster would not have the study's file."""

    cluster: Path
    """The file for `ray up`, in the clone."""
    name: str
    study: Path
    options: tuple[str, ...] = ()
    """Those of `batchscout run`, but for the address."""
    in_tmux: bool = False
    """The study goes on without this machine, and its exit code is lost."""

    def __post_init__(self) -> None:
        if not self.cluster.is_file():
            raise ValueError(
                f"there is no {quoted(self.cluster)}, which is to say where the cluster is; run this in the clone, or give --cluster"
            )
        if not Path(os.path.abspath(self.study)).is_relative_to(self.clone):
            raise ValueError(
                f"{quoted(self.study)} is not in {quoted(self.clone)}, which is all that the cluster is sent; move it there, with the "
                "code and data that it names"
            )

    @property
    def clone(self) -> Path:
        return Path(os.path.abspath(self.cluster)).parent

    @property
    def path(self) -> str:
        """The study's file in the clone."""
        return os.path.relpath(self.study, self.clone)


def ray_command(sent: SentStudy, verb: str, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return a command of Ray's launcher, for the clone. words: what follows the cluster's file, none of them taken for an option."""
    return ["ray", verb, *options, "--", sent.cluster.name, *words]


def on_the_head(sent: SentStudy, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return what runs a command on the head, in the home folder, with these words as they are."""
    return ray_command(sent, "exec", shlex.join(words), options=options)


def run_command(sent: SentStudy) -> list[str]:
    """Return what runs the study on the cluster."""
    script = f"{CLONE}/configs/submit.py"
    return on_the_head(sent, "python", script, sent.path, *sent.options, options=("--tmux",) if sent.in_tmux else ())


def status_command(sent: SentStudy) -> list[str]:
    """Return what shows how far the study is, from outside of the cluster."""
    return on_the_head(sent, "batchscout", "status", f"{CLONE}/runs/{sent.name}")


def fetch_command(sent: SentStudy) -> list[str]:
    """Return what fetches the run directories of all studies: no name of one is in it, which older rsyncs would take apart."""
    return ray_command(sent, "rsync-down", f"~/{CLONE}/runs/", "runs/")


def make_token() -> None:
    """Make the key to this user's clusters if there is none yet, and close it to everybody else.

    It is the file that Ray reads by itself, and that cluster.yaml brings to the nodes. `ray get-auth-token --generate` would make
    one that others can read.
    """
    token = Path.home() / ".ray" / "auth_token"
    with own_file(token):
        token.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=token.parent) as file:  # closed to others, and never half written
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, token)
        token.chmod(0o600)


def launch(sent: SentStudy, *, is_agreed: bool) -> bool:
    """Run the study on the cluster, or start it there in tmux. Return whether all went well; Ray has said what did not.

    is_agreed: the user was asked already whether the cluster is to be started, which may cost money.
    """
    make_token()
    if _run(sent, ray_command(sent, "get-head-ip"), output=subprocess.DEVNULL):
        ready = ray_command(sent, "rsync-up", "./", f"~/{CLONE}/")
    else:
        ready = ray_command(sent, "up", options=("--yes",) if is_agreed else ())
    return _run(sent, ready) and _run(sent, run_command(sent))


def _run(sent: SentStudy, command: list[str], output: int | None = None) -> bool:
    """Run one of Ray's commands, and return whether it went well."""
    done = subprocess.run([*RAY, *command[1:]], cwd=sent.clone, stdout=output, stderr=output, check=False)
    return done.returncode == 0
