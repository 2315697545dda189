"""The documentation as a site and as a manual page: ``make docs``.

Documents link to files of the repository that are not pages. On the site these links lead to the repository, if
``REPOSITORY_URL`` says where that is; otherwise their text stands without a link.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from sphinx.application import Sphinx

import paddle_reshard

HERE = Path(__file__).parent
REPOSITORY = os.environ.get("REPOSITORY_URL", "").rstrip("/")

project = "paddle-reshard"
author = "The paddle-reshard authors"
version = release = paddle_reshard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
source_suffix = {".md": "markdown"}
root_doc = "index"
highlight_language = "none"
exclude_patterns = ["README*"]
suppress_warnings = [
    "myst.header"
]  # pages that begin with a heading of the second level, as a part of a page

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = "paddle-reshard"
html_show_sourcelink = False
html_show_copyright = False
html_extra_path = ["schemas"]
html_theme_options = {
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_end": ["theme-switcher"],
    "show_toc_level": 2,
}
man_pages = [("reference/commands", "paddle-reshard", "convert PaddlePaddle training checkpoints", author, 1)]

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)")


def to_the_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to what is no page lead to the repository."""

    def led(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if (name.endswith(".md") and not name.startswith("../")) or name.startswith("pictures/"):
            return match[0]
        if not REPOSITORY:
            return text
        return f"[{text}]({REPOSITORY}/blob/main/{posixpath.normpath(posixpath.join('docs', name))}{anchor})"

    source[0] = _LINK.sub(led, source[0])


def setup(app: Sphinx) -> None:
    """Connect what is above with Sphinx, which calls this."""
    app.connect("source-read", to_the_repository)
