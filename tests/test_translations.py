"""The Chinese pages say what the English ones say, and nobody changes one of them alone."""

import shutil

import pytest
from tools.pages import translations

ROOT = translations.ROOT
ENGLISH = """# Rings

A ring of `N` ranks takes 2 steps, see [the proof](verify.md).

- one
- two

| method | bytes |
| --- | --- |
| ring | 1.5 |

```python
print(1)
```
"""
CHINESE = """# 环

由 `N` 个 rank 组成的环需要 2 步。见[证明](verify.md)。

- 一
- 二

| 方法 | 字节 |
| --- | --- |
| ring | 1.5 |

```python
print(1)
```
"""


def test_every_page_is_there_in_chinese_and_as_it_is_in_english():
    left = translations.differences()
    assert not left, "\n".join(
        [*left, "when Chinese is right: python -m tools.pages.translations --record"]
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("print(1)", "print(2)", "code differs: '```python"),
        (
            "| ring | 1.5 |",
            "| ring | 2.5 |",
            "numbers of '| ring | 1.5 |' only in English: 1.5",
        ),
        ("2 步", "3 步", "only in English: 2"),
        ("`N`", "`M`", "names only in English: `N`"),
        ("verify.md", "hangs.md", "links only in English: docs/verify.md#"),
        ("- 二\n", "", "English is text, list of 2 items"),
        ("# 环", "## 环", "levels of the heading: 1 in English, 2"),
        ("- 一", "## 一\n\n- 一", "1 headings in English, 2 in Chinese"),
    ],
)
def test_a_difference_is_named(old, new, expected):
    assert not translations.compare("docs/rings.md", ENGLISH, CHINESE)
    found = translations.compare("docs/rings.md", ENGLISH, CHINESE.replace(old, new))
    assert found
    assert found[0].startswith("docs/rings.md")
    assert expected in found[0]


@pytest.fixture
def copy(tmp_path):
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / translations.RECORD]:
        (tmp_path / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, tmp_path / page.relative_to(ROOT))
    return tmp_path


def test_english_that_changes_alone_is_found(copy):
    before = translations.differences(copy)
    page = copy / "docs" / "verify.md"
    page.write_text(page.read_text().replace("It answers one question", "It answers a question"))
    (copy / "docs" / "new.md").write_text("# New\n")
    assert sorted(set(translations.differences(copy)) - set(before)) == [
        "docs/new.md: there is no docs/zh/new.md",
        "docs/verify.md 1 # The proof: changed in English since it was translated",
    ]
