"""The metadata of a built wheel: the package's own values, and no foreign requirement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.requirements import Requirement

from ..packages import PACKAGES, folder, version, version_file
from ..release.addresses import urls
from ..rows import CheckError, found
from .files import about

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#)([^)]*)\)")


def metadata(wheel: Path) -> Metadata:
    """Return a wheel's metadata; raise `CheckError` if it breaks the standard."""
    try:
        return Metadata.from_email(about(wheel, "METADATA"), validate=True)
    except ExceptionGroup as several:
        raise CheckError("\n".join(map(str, several.exceptions))) from several


def wrong_words(wheel: Path, package: str) -> Iterator[str]:
    """Yield a sentence for each missing field, and each that differs from the package's value."""
    said = metadata(wheel)
    expected = {
        "name": package,
        "version": version(package),
        "requires_python": ">=3.11",
        "license_expression": "MIT",
        "license_files": "['LICENSE']",
        "description_content_type": "text/markdown",
        "project_urls": str(urls(package) or None),
        "description": (folder(package) / "README.md").read_text(),
    }
    for field, words in expected.items():
        got = str(getattr(said, field))
        if got != words:
            yield f"{field} is {got[:60]!r}, not {words[:60]!r}"
    if not said.summary:
        yield "summary is empty"
    for link in RELATIVE_LINK.findall(CODE.sub("", said.description or "")):
        yield f"the README links to {link}, which leads nowhere on the page of an index"


def wrong_requirements(wheel: Path, package: str) -> Iterator[str]:
    """Yield a sentence for each foreign requirement, and each sibling without a pinned series."""
    said = [each for each in metadata(wheel).requires_dist or [] if each.marker is None]
    for each in said:
        if each.name in PACKAGES:
            yield from wrong_pin(each)
        elif each.name != "torch":
            yield f"it requires {each}: torch and siblings alone may be required"
    pins = {str(each) for each in said if each.name in PACKAGES}
    if (checked := pins_at_import(wheel, package)) != pins:
        yield f"at import it checks {sorted(checked)}, and its metadata require {sorted(pins)}"


def wrong_pin(sibling: Requirement) -> Iterator[str]:
    """Yield a sentence if a pin refuses the sibling's version here, or allows its next series."""
    now = version(sibling.name)
    if not sibling.specifier.contains(now, prereleases=True):
        yield f"{sibling} refuses {sibling.name} {now}, which is the one here"
    if sibling.specifier.contains(next_series(sibling.name)):
        yield f"{sibling} allows {sibling.name} {next_series(sibling.name)}, another series"


def next_series(package: str) -> str:
    """Return the first version of a package's next series: `0.2.0` if it is at `0.1.7`."""
    major, minor, *_ = version(package).split(".")
    return f"{major}.{int(minor) + 1}.0"


def pins_at_import(wheel: Path, package: str) -> set[str]:
    """Return the pins of siblings that a wheel's code compares at import."""
    path = version_file(package).relative_to(folder(package) / "src")
    with ZipFile(wheel) as archive:
        text = archive.read(str(path)).decode() if str(path) in archive.namelist() else ""
    return set(re.findall(r'"(scaletorch-\w+~=[^"]*)"', text))


def own_words(wheel: Path, package: str) -> str:
    """Check a wheel's metadata."""
    faults = [*wrong_words(wheel, package), *wrong_requirements(wheel, package)]
    said = metadata(wheel)
    needs = [str(each) for each in said.requires_dist or [] if each.marker is None]
    return found(faults, f"{said.version}, Python {said.requires_python}, {', '.join(needs)}")
