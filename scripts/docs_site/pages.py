"""Pages of the site that stand outside of docs/; a hook of mkdocs.

Source: mkdocs, "Hooks" and "Files" (`File.generated`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = {
    "architecture-supervisor.md": "supervisor/DESIGN.md",
    "architecture-proxy.md": "proxy/DESIGN.md",
    "changelog.md": "CHANGELOG.md",
    "site.css": "scripts/docs_site/site.css",
}
_LINK_INTO_THE_TREE: Final = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages; their links into the source tree become text (mkdocs calls this by name)."""
    for page, source in PAGES.items():
        text = _LINK_INTO_THE_TREE.sub(r"\1", (ROOT / source).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))
    return files
