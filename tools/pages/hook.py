"""Extensions of mkdocs: pages from outside docs/, the Chinese section, the API's pages.

mkdocs calls the functions named `on_…`. In the sources links are relative to the file, as on
GitHub. Here they point to the page made of the file, or are dropped if there is none.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
# Files outside docs/ that become pages.
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh/index.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    **{f"packages/{path.name}/README.md": f"packages/{path.name}.md" for path in PACKAGES},
}
CHINESE = "中文"
# Titles of the navigation on Chinese pages.
TITLES = {
    "Home": "首页",
    "Guides": "指南",
    "Packages": "软件包",
    "First steps": "第一步",
    "Strategies": "并行策略",
    "Communication": "通信",
    "Numbers": "数值",
    "Running": "运行",
    "Project": "项目",
}
# Public modules that are part of a wheel's portion.
MODULES = tuple(f"scaletorch.dist.{name}" for name in ("devices", "functional", "testing"))
# Code blocks, and links.
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.S | re.M)
_LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(\s*([^)\s]+?)\s*\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: packages, the API, and translated pages."""
    nav: list[Any] = config.nav or []
    guides = nav[-1]["Guides"]
    found = [page for file, page in PAGES.items() if (ROOT / file).exists()]
    guides[0]["First steps"] += [p for p in ("examples.md",) if p in found]
    guides[-1]["Project"] += [p for p in ("contributing.md", "code_of_conduct.md") if p in found]
    chinese = _translated(guides)
    nav.append({"Packages": [page for page in found if page.startswith("packages/")]})
    nav.append({"API": ["api/index.md", *({name: p} for name, p in _reference().items())]})
    if chinese:
        home = ["zh/index.md"] if "zh/index.md" in found else []
        nav.append({CHINESE: [*home, *chinese]})
    return config


def _translated(pages: list[Any]) -> list[Any]:
    """Return the navigation of the translations: the same sections, with translated titles."""
    found: list[Any] = []
    for entry in pages:
        if isinstance(entry, str):
            found += [f"zh/{entry}"] if (ROOT / "docs" / "zh" / entry).exists() else []
        else:
            ((title, inside),) = entry.items()
            section = _translated(inside)
            found += [{TITLES.get(title, title): section}] if section else []
    return found


def _reference() -> dict[str, str]:
    """Return the importable portions of all wheels, with the page of each."""
    portions = []
    for package in PACKAGES:
        data = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
        folders = data["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
        portions += [folder.removeprefix("src/").replace("/", ".") for folder in folders]
    return {name: f"api/{name}.md" for name in sorted([*portions, *MODULES])}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and one for each portion of the API."""
    from mkdocs.structure.files import File

    for file, page in PAGES.items():
        if (ROOT / file).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    reference = _reference()
    for name, page in reference.items():
        files.append(File.generated(config, page, content=f"# {name}\n\n::: {name}\n"))
    rows = [f"| [`{name}`]({page.removeprefix('api/')}) |" for name, page in reference.items()]
    index = "\n".join(["# API", "", "| import |", "| --- |", *rows, ""])
    files.append(File.generated(config, "api/index.md", content=index))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Rewrite the links of a page, except in code blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_turn(markdown[end : fence.start()], page, files), fence[0]]
        end = fence.end()
    return "".join([*parts, _turn(markdown[end:], page, files)])


def _turn(text: str, page: Page, files: Files) -> str:
    here = page.file.src_uri
    origin = {to: file for file, to in PAGES.items()}.get(here, f"docs/{here}")

    def turned(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        to = PAGES.get(file, file.removeprefix("docs/"))
        if to in files.src_uris:
            link = posixpath.relpath(to, posixpath.dirname(here) or ".")
            return f"[{words}]({link}{'#' + anchor if anchor else ''})"
        return words if (ROOT / file).exists() else match[0]

    return _LINK.sub(turned, text)


def on_page_context(context: Any, *, page: Page, config: MkDocsConfig, nav: Any) -> Any:
    """Set the theme's language, the titles, and the link to the same page in the other language."""
    here = page.file.src_uri
    chinese = here.startswith("zh/")
    config.theme["language"] = "zh" if chinese else "en"
    back = {chinese: english for english, chinese in TITLES.items()}
    for item in nav.items:
        item.title = (TITLES if chinese else back).get(item.title, item.title)
    english = here.removeprefix("zh/")
    pages = {each.file.src_uri: each.url for each in nav.pages}
    links = (pages.get(english, "./"), pages.get(f"zh/{english}", "zh/"))
    for entry, link in zip(config.extra["alternate"], links, strict=True):
        entry["link"] = link or "./"
    return context
