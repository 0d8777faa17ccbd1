"""Links between READMEs, guides and files lead somewhere, to the very heading."""

import re

import pytest
from document_blocks import ROOT, pages, prose, translations

LINK = re.compile(r"\]\(\s*([^)\s]+?)\s*\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
ALL = [*pages(), *translations()]


def anchors(page):
    """Return the names that GitHub gives to a page's headings, and those that it gives itself."""
    text = prose(page)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(text)]
    slugs = {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", ALL)
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(re.sub(r"`[^`]*`", "", prose(page))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (
            anchor and anchor not in anchors(file.resolve().relative_to(ROOT))
        ):
            broken.append(target)
    assert not broken
