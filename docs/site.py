"""Hook of mkdocs: pages that lie outside this folder, and links which lead out of it.

The READMEs and the other documents of the root are pages of the site too, each where `nav` says.
Links stay as GitHub wants them: relative to the file. One to a page leads to that page; one to
anything else of the repository (a source file, a folder) becomes its text, since the site does not
have it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
} | {
    f"{folder}/README.md": f"{folder}.md"
    for parent in ("packages", "apps")
    for folder in sorted(
        f"{parent}/{path.parent.name}" for path in ROOT.glob(f"{parent}/*/README.md")
    )
}
"""Path in the repository -> page."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for source, page in OUTSIDE.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point every link at a page of the site, or leave its text."""
    pages = {target: source for source, target in OUTSIDE.items()}
    here = pages.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def follow(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        found = page_of(path)
        if found is None:
            if not (ROOT / path).exists():
                return link.group()  # mkdocs says that it is broken
            return text
        start = posixpath.dirname(page.file.src_uri)
        return f"{image}[{text}]({posixpath.relpath(found, start or '.')}{anchor or ''})"

    return LINK.sub(follow, markdown)


def page_of(path: str) -> str | None:
    """The page or picture of the site that a path of the repository is; None: it is none."""
    for candidate in (path, f"{path}/README.md"):
        if candidate in OUTSIDE:
            return OUTSIDE[candidate]
    if path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return None
