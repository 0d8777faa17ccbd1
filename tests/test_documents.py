"""Every Python snippet of the READMEs and guides runs, and prints the output shown after it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ["README.md", "packages/*/README.md", "docs/**/*.md"]
DOCUMENTS = [document for pattern in PATTERNS for document in sorted(ROOT.glob(pattern))]
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```output\n(.*?)```)?", re.S)
SNIPPETS = [
    pytest.param(code, output, id=f"{document.relative_to(ROOT)}:{number}")
    for document in DOCUMENTS
    for number, (code, output) in enumerate(SNIPPET.findall(document.read_text()), 1)
]


@pytest.mark.parametrize(("code", "output"), SNIPPETS)
def test_snippet_runs(code, output, tmp_path):
    (tmp_path / "snippet.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert not output or done.stdout == output
