"""Pages of the site that are files of the repository outside docs/: a hook of mkdocs, see mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SECTION = re.compile(r"((?:^#.*\n)*)^\[(\w+)\]\n", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=relinked((ROOT / source).read_text("utf-8"), "")))
    files.append(File.generated(config, "configuration.md", content=configuration()))
    return files


def configuration() -> str:
    """The reference of all keys, with a heading for each section."""
    head, *sections = SECTION.split((ROOT / "configs" / "reference.toml").read_text("utf-8"))
    parts = [f"# Configuration\n\nEvery key with its default: `configs/reference.toml`.\n\n```toml\n{head}```\n"]
    for comment, name, keys in zip(*[iter(sections)] * 3, strict=True):
        parts.append(f"## {name}\n\n```toml\n{comment}[{name}]\n{keys}```\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page in docs/ lead to pages."""
    return markdown if page.file.generated_by else relinked(markdown, "docs")


def relinked(markdown: str, folder: str) -> str:
    """The links of a file in `folder` lead to pages; what has no page is named without a link."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        path_text = (ROOT / folder / path).resolve().relative_to(ROOT).as_posix()
        if path_text in PAGES:
            page = PAGES[path_text]
        elif path_text == "configs/reference.toml":
            page = "configuration.md"
        elif path_text.startswith("docs/"):
            page = path_text.removeprefix("docs/")
        else:
            return text if text.startswith("`") else f"`{text}`"
        return f"[{text}]({page}#{anchor})" if anchor else f"[{text}]({page})"

    return LINK.sub(link, markdown)
