"""What the site does with pages that are written for GitHub: links out of `docs/` lead somewhere, and docstrings appear.

The files in `docs/` link to code, examples and results outside. The site gets a page for each that is linked: Markdown as
it is, code as code, folders as lists; all else is copied. A link to README.md, GitHub's front page, leads to the site's.
`<!-- api: NAME -->` becomes the docstring of that name, which GitHub does not show.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Code comes first, so that what looks like a link or a marker in it stays as it is.
_PIECES = re.compile(
    r"(?P<code>^(?P<fence>```|~~~).*?^(?P=fence)|^(?:    [^\n]*\n)+|`[^`\n]*`)"
    r"|(?P<before>\]\()(?P<link>[^)\s]+)(?P<after>(?:\s+\"[^\"]*\")?\))"
    r"|<!-- api: (?P<api>[\w.]+) -->",
    re.MULTILINE | re.DOTALL,
)
_LANGUAGES = {".py": "python", ".c": "c", ".yaml": "yaml", ".toml": "toml", ".js": "javascript", ".css": "css"}
_COPIED = {".png", ".svg", ".csv", ".jsonl", ".ipynb"}
_FRONT_PAGE = "README.md"
_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the project outside of `docs/`, and a page for each file that one of them links to."""
    todo = [*_PAGES, *sorted(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    added = {_FRONT_PAGE, *(f"docs/{file.src_uri}" for file in files)}
    while todo:
        path = todo.pop(0)
        if path not in added:
            files.append(_file(path, config))
            added.add(path)
        if path.endswith(".md"):
            todo += [link for link in _links(path) if link not in added and link not in todo]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page, and the markers for docstrings, into the site's."""
    if any(section.title in {"Your tool", "Your question"} for section in page.ancestors):
        # Whoever searches has a question; guides answer it, and all other pages have its words as well.
        page.meta["search"] = {"boost": 2}
    path = repository_path(page.file.src_uri)
    return rewritten(markdown, path) if (ROOT / path).suffix == ".md" else markdown


def repository_path(uri: str) -> str:
    """Return where in the repository the source of a page is."""
    inside = posixpath.join("docs", uri)
    return inside if (ROOT / inside).exists() else uri


def site_uri(path: str) -> str:
    """Return where in the site a file of the repository is."""
    if path == _FRONT_PAGE:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    suffix = posixpath.splitext(path)[1]
    if (ROOT / path).is_dir():
        return posixpath.join("source", path, "index.md")
    if suffix == ".md":
        return path
    return posixpath.join("source", path) + ("" if suffix in _COPIED else ".md")


def rewritten(markdown: str, path: str) -> str:
    """Return a page of the repository with the site's links, and docstrings where markers ask for them."""

    def replace(match: re.Match[str]) -> str:
        if match["api"]:
            return f"::: {match['api']}"
        if match["link"]:
            return match["before"] + _site_link(match["link"], path) + match["after"]
        return match[0]

    return _PIECES.sub(replace, markdown)


def _site_link(link: str, path: str) -> str:
    """Return the link of a page as it is in the site; what leads out of the repository stays."""
    name, mark, anchor = link.partition("#")
    target = _target(name, path)
    if target is None:
        return link
    here = posixpath.dirname(site_uri(path)) or "."
    return posixpath.relpath(site_uri(target), here) + mark + anchor


def _target(name: str, path: str) -> str | None:
    """Return the file of the repository that a relative link leads to."""
    if not name or re.match(r"[a-z][a-z+.-]*:", name):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    return target if (ROOT / target).exists() else None


def _links(path: str) -> Iterator[str]:
    for match in _PIECES.finditer((ROOT / path).read_text(encoding="utf-8")):
        target = _target(match["link"].partition("#")[0], path) if match["link"] else None
        if target is not None:
            yield target


def _file(path: str, config: MkDocsConfig) -> File:
    """Return a file of the repository as a file of the site."""
    uri, source = site_uri(path), ROOT / path
    level = InclusionLevel.NOT_IN_NAV
    if not uri.endswith(".md"):
        return File.generated(config, uri, abs_src_path=str(source), inclusion=level)
    if uri == path:
        return File.generated(config, uri, content=source.read_text(encoding="utf-8"))
    content = _listing if source.is_dir() else _code_page
    return File.generated(config, uri, content=content(source, path), inclusion=level)


# Code and lists of files would bury the pages that people look for.
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def _code_page(source: Path, path: str) -> str:
    language = _LANGUAGES.get(source.suffix, "text")
    # More backticks than any file has in a row.
    return f"{_NOT_SEARCHED}# `{path}`\n\n``````{language}\n{source.read_text(encoding='utf-8')}\n``````\n"


def _listing(source: Path, path: str) -> str:
    names = sorted(one.name + "/" * one.is_dir() for one in source.iterdir() if one.name[0] not in "_.")
    return f"{_NOT_SEARCHED}# `{path}/`\n\n" + "".join(f"- `{name}`\n" for name in names)
