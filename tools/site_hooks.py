"""Hooks of MkDocs that make a site of the pages; mkdocs.yml names them.

Pages are Markdown that reads well in a repository. Here the README becomes the first page, the
Python reference is made of docs/public-names.md, decisions get a list, and links between all these
lead where the pages went.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from site_picture import picture

ROOT = Path(__file__).resolve().parent.parent

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "src/kvcellar/kernel/README.md": "kernel.md",
}
"""Pages that do not lie in docs/, and what they are called in the site."""

LOADS = re.compile(
    r"""<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"' >]+)"""
    r"""|(?:@import|url\()\s*["']?((?:https?:)?//[^"')]+)"""
)


def on_config(config: Any) -> Any:
    """Put pages where the navigation has a pattern."""
    made = {"python/*.md": [f"python/{name}.md" for name in sections()]}
    for section in config.nav:
        for title, entries in section.items():
            section[title] = [
                page for entry in entries for page in made.get(entry) or matching(entry)
            ]
    return config


def matching(entry: str) -> list[str]:
    """Return the pages that a pattern fits; an entry that is none as it is."""
    if "*" not in entry:
        return [entry]
    paths = sorted((ROOT / "docs").glob(entry), key=lambda path: (path.name != "README.md", path))
    return [str(path.relative_to(ROOT / "docs")) for path in paths]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/, and those that are made."""
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for name, section in sections().items():
        page = f"python/{name}.md"
        files.append(File.generated(config, page, content=reference(name, section)))
    return files


def sections() -> dict[str, str]:
    """Return the modules that docs/public-names.md names, each with its section."""
    text = (ROOT / "docs" / "public-names.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


def reference(module: str, section: str) -> str:
    """Return a module's page of the reference: what its public names say of themselves."""
    parts = []
    for line in re.split(r"\n\n", section.strip()):
        if line.startswith("- "):
            parts += [f"::: {module}.{name}" for name in names_in(line)]
        else:
            parts.append(line)
    return "\n\n".join([f"# {module}", *parts])


def names_in(listed: str) -> list[str]:
    """Return the names of a list in docs/public-names.md."""
    return re.findall(r"`(\w+)`", listed)


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Turn links to where pages lie in the repository into links to where they are in the site."""
    uri = page.file.src_uri
    if uri == "public-names.md":
        text = linked_names(text)
    source = {page: source for source, page in ELSEWHERE.items()}.get(uri, f"docs/{uri}")
    text = linked(text, source, uri)
    return re.sub(r"```mermaid\n(.*?)```", lambda drawn: picture(drawn[1]), text, flags=re.DOTALL)


def linked(text: str, source: str, uri: str) -> str:
    """Return text of the file ``source`` with its links as the page ``uri`` has to have them."""
    link = r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)"
    return re.sub(link, lambda found: moved(found, source, uri), text)


def linked_names(text: str) -> str:
    """Return docs/public-names.md with each name leading to what it says of itself."""
    for module, section in sections().items():
        linked = section
        for listed in re.findall(r"^- .*?(?=\n\n|\Z)", section, re.DOTALL | re.MULTILINE):
            line = re.sub(r"`(\w+)`", rf"[`\1`][{module}.\1]", listed)
            linked = linked.replace(listed, line)
        text = text.replace(f"## `{module}`\n{section}", f"## `{module}`\n{linked}")
    return text


def moved(link: re.Match[str], source: str, uri: str) -> str:
    """Return a link of a page at ``source``, for ``uri``; text where it leaves the site."""
    mark, text, target, anchor = link.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path not in ELSEWHERE and not path.startswith("docs/"):
        return text if (ROOT / path).exists() else link[0]
    page = ELSEWHERE.get(path, path.removeprefix("docs/"))
    if (ROOT / path).is_dir():
        page += "/README.md"
    return f"{mark}[{text}]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{anchor or ''})"


def on_post_page(html: str, **_: Any) -> str:
    """Give the theme's dialog of the search the name that screen readers ask for."""
    return html.replace('class="md-search"', 'class="md-search" aria-label="Search"')


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site that would load anything from elsewhere.

    Raises:
        PluginError: some pages do; which, and what.
    """
    site = Path(config.site_dir)
    wrong = [
        f"{path.relative_to(site)} loads {where}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for where in loads(path.read_text(encoding="utf-8"))
    ]
    if wrong:
        raise PluginError("\n".join(["the site needs a network:", *wrong[:20]]))


def loads(text: str) -> list[str]:
    """Return the addresses elsewhere that HTML or CSS loads something from."""
    found = [a or b for a, b in LOADS.findall(text)]
    return [where for where in found if "canonical" not in where]
