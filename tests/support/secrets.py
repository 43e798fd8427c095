"""What no study may write anywhere: stand-ins for the keys that people have in their environment."""

from __future__ import annotations

from pathlib import Path

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "the-key-of-an-account",
    "AWS_SESSION_TOKEN": "the-token-of-a-session",
    "HF_TOKEN": "the-token-of-a-hub",
    "WANDB_API_KEY": 4 * "the-key-of-",
    "RAY_AUTH_TOKEN": 4 * "the-token-of-ray",
}


def told_below(folder: Path) -> set[tuple[str, str]]:
    """Each (name of a file, name of a secret that is in it). Ray's logs must be among the files."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert any(file.name == "runtime_env_agent.log" for file in files)
    return {
        (file.name, name) for file in files for name, secret in SECRETS.items() if secret.encode() in file.read_bytes()
    }
