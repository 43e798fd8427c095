"""Which versions of torch and Ray batchscout runs with: what pyproject.toml admits, as the installed package tells it."""

from __future__ import annotations

from importlib.metadata import requires, version

from packaging.requirements import Requirement


def admitted(library: str) -> Requirement:
    """Return what is admitted of a library; as text, it is what pip takes."""
    found = map(Requirement, requires("batchscout") or ())
    return next(one for one in found if one.name == library and one.marker is None)


def is_admitted(library: str, number: str) -> bool:
    return admitted(library).specifier.contains(number, prereleases=True)


def refuse_other_versions() -> None:
    """Raise ValueError where a torch or Ray was installed that pip advises against, before it is imported: much of what
    is private to Ray is used, of which another version lacks some."""
    for library in ("torch", "ray"):
        if not is_admitted(library, number := version(library)):
            wanted = admitted(library)
            raise ValueError(
                f"{library} {number} is installed, and {library}{wanted.specifier} is needed; pip install '{wanted}'"
            )
