"""Addresses of the project, which the owner of a release sets once, and the wheels' URLs.

`repository` in `[tool.scaletorch]` of the workspace's pyproject is the address of a public copy of
this repository; `documentation` is the site's address and optional. Both are unset until the owner
of the addresses sets them.
"""

from __future__ import annotations

import re
import tomllib

from ..packages import ROOT, folder, pyproject
from .versions import ReleaseError, changelog

ADDRESS = re.compile(r"https://[\w.-]+(/[\w.~-]+)*")
WANTED = (
    "give the address of the public repository in pyproject.toml: "
    '[tool.scaletorch] repository = "https://..."'
)
_URLS = re.compile(r"^\[project\.urls\]\n(?:[^\[\n].*\n)*\n", re.M)


def setting(name: str) -> str | None:
    """Return an address of the workspace's settings, or None if it is not set.

    Raises:
        ReleaseError: The value is not the address of a page.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"].get("scaletorch", {})
    address: str | None = settings.get(name)
    if address is not None and not ADDRESS.fullmatch(address):
        raise ReleaseError(f"{name} is {address!r}; expected https://, a host and a path without /")
    return address


def urls(package: str) -> dict[str, str]:
    """Return the `[project.urls]` of a package's wheel; empty if no address is set."""
    repository = setting("repository")
    if repository is None:
        return {}
    written = changelog(package).relative_to(ROOT)
    return {
        "Homepage": repository,
        "Documentation": setting("documentation") or f"{repository}/tree/main/docs",
        "Repository": repository,
        "Changelog": f"{repository}/blob/main/{written}",
        "Issues": f"{repository}/issues",
    }


def require_repository() -> None:
    """Raise ReleaseError if the repository's address is not set."""
    if setting("repository") is None:
        raise ReleaseError(f"the wheels would not say where they come from: {WANTED}")


def write_urls(package: str) -> None:
    """Write a package's `[project.urls]`."""
    file = folder(package) / "pyproject.toml"
    lines = [f'{name} = "{address}"\n' for name, address in urls(package).items()]
    section = "".join(["[project.urls]\n", *lines, "\n"]) if lines else ""
    text = _URLS.sub("", file.read_text())
    file.write_text(text.replace("[tool.", section + "[tool.", 1))


def check_urls(package: str) -> None:
    """Raise ReleaseError if a package's `[project.urls]` differ from the settings."""
    require_repository()
    if pyproject(package)["project"].get("urls", {}) != urls(package):
        raise ReleaseError(f"{package} has other [project.urls] than pyproject.toml says: bump it")
