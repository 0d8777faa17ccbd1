"""Programs and commands of the READMEs and guides run, and print the output shown after them."""

import re
from pathlib import Path

import pytest
from document_blocks import (
    ROOT,
    RUN,
    RUN_ELSEWHERE,
    SHOWN,
    blocks,
    pages,
    prose,
)
from document_programs import run
from sweeps import today

BLOCKS = {page: blocks(page) for page in pages()}
RUNNING = [
    pytest.param(block, id=f"{page}:{block.line}")
    for page, found in BLOCKS.items()
    for block in found
    if block.language in RUN and page not in RUN_ELSEWHERE
]
READMES = [each for each in RUNNING if each.id.partition(":")[0].endswith("README.md")]
GUIDES = [each for each in RUNNING if each not in READMES]


@pytest.mark.parametrize("block", [*today(READMES, 8), *today(GUIDES, 20)])
def test_a_block_runs_and_prints_what_is_shown(block, tmp_path):
    if "from transformers" in block.code:
        pytest.importorskip("transformers")
    for other in BLOCKS[block.page]:
        if other.name:
            (tmp_path / other.name).write_text(other.code, encoding="utf-8")
    printed = run(block.language, block.code, tmp_path)
    assert block.output is None or printed == block.output


@pytest.mark.parametrize("page", BLOCKS)
def test_blocks_are_fenced_and_say_what_they_are(page):
    known = (*RUN, *SHOWN, "py") if page in RUN_ELSEWHERE else (*RUN, *SHOWN)
    unknown = [b for b in BLOCKS[page] if b.language not in known]
    assert not unknown, "languages are told in document_blocks.py"
    # Four spaces after an empty line would be a block without a language; in lists they are text.
    indented = re.findall(r"^(?! *(?:[-*]|\d+\.) )(?! ).*\n\n(    .*)$", prose(page), re.M)
    assert not indented, "use a fence with a language"


@pytest.mark.parametrize("page", set(RUN_ELSEWHERE) & set(BLOCKS))
def test_pages_that_run_elsewhere_are_read_there(page):
    assert Path(page).name in (ROOT / RUN_ELSEWHERE[page]).read_text(encoding="utf-8")
