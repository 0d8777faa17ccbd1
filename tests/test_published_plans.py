"""The page on published runs has the tables that its benchmark computes."""

import pytest
from benchmarks.published_plans import PAGES, TABLE, tables, written


@pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])
def test_tables_of_the_page_are_computed(page):
    text = page.read_text()
    assert {match[2] for match in TABLE.finditer(text)} == set(tables())
    again = written(text, chinese=page.parent.name == "zh")
    assert again == text, "python -m benchmarks.published_plans --write"
