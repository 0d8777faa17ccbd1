"""Programs and commands of the READMEs and guides run, and print the output shown after them."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from document_blocks import (
    RUN,
    SHOWN,
    blocks,
    pages,
    prose,
)
from document_programs import run

BLOCKS = {page: blocks(page) for page in pages()}
RUNNING = [
    pytest.param(block, id=f"{page}:{block.line}")
    for page, found in BLOCKS.items()
    for block in found
    if block.language in RUN
]


@pytest.mark.parametrize("block", RUNNING)
def test_a_block_runs_and_prints_what_is_shown(block, tmp_path):
    if "transformers" in block.code:
        pytest.importorskip("transformers")
    for other in BLOCKS[block.page]:
        if other.name:
            (tmp_path / other.name).write_text(other.code, encoding="utf-8")
    printed = run(block.language, block.code, tmp_path)
    assert block.output is None or printed == block.output


@pytest.mark.parametrize("page", BLOCKS)
def test_blocks_are_fenced_and_say_what_they_are(page):
    unknown = [b for b in BLOCKS[page] if b.language not in (*RUN, *SHOWN)]
    assert not unknown, "languages are told in document_blocks.py"
    # Four spaces after an empty line would be a block without a language; in lists they are text.
    indented = re.findall(r"^(?![ ]*(?:[-*]|\d+\.) )(?! ).*\n\n(    .*)$", prose(page), re.M)
    assert not indented, "use a fence with a language"
