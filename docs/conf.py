"""The documentation as a site in English, one in Chinese below it, and a manual page: ``make docs``.

Both sites are made with this configuration. The Chinese one has the folder ``zh`` as its source and ``zh_CN`` as its
language, so that its frame is Chinese too; its links to pages that are in English only lead to the English site.

Documents link to files of the repository that are not pages. On the site these links lead to the repository, if
``REPOSITORY_URL`` says where that is; otherwise their text stands without a link.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

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
exclude_patterns = ["README*", "zh"]
templates_path = ["_templates"]
suppress_warnings = [
    "myst.header"
]  # pages that begin with a heading of the second level, as a part of a page

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]

autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
autodoc_mock_imports = ["pyarrow"]  # of an extra that documents do not need
autodoc_member_order = "bysource"
napoleon_google_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = "paddle-reshard"
html_show_sourcelink = False
html_use_index = False
html_show_copyright = False
html_extra_path = ["schemas"]
html_theme_options = {
    "header_links_before_dropdown": 8,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_end": ["language-switch", "theme-switcher"],
    "show_toc_level": 2,
}
html_search_language = "bigrams"
html_search_scorer = str(HERE / "scorer.js")
man_pages = [("reference/commands", "paddle-reshard", "convert PaddlePaddle training checkpoints", author, 1)]

SYNONYMS = {
    "guides/fewer-cards": (
        *(
            "fewer cards",
            "more cards",
            "fewer gpus",
            "more gpus",
            "change topology",
            "change parallelism",
            "elastic",
        ),
        *("断点续训", "卡数", "换卡", "减卡", "扩容", "缩容", "改变拓扑"),
    ),
    "guides/jobs-that-go-on": (
        "resume",
        "restart",
        "kubernetes",
        "fault tolerance",
        "自动继续",
        "重启",
        "容错",
    ),
    "guides/export": ("hugging face", "safetensors", "vllm", "inference", "serving", "部署", "推理", "导出"),
    "guides/average": ("moving average", "ema", "merge weights", "soup", "滑动平均", "权重平均"),
    "guides/watch": ("continuous conversion", "during training", "自动转换", "监视"),
    "guides/clusters": ("ray", "many machines", "distributed", "多机", "分布式", "集群"),
    "guides/object-stores": (
        "s3",
        "bos",
        "oss",
        "cloud storage",
        "credentials",
        "对象存储",
        "云存储",
        "凭证",
    ),
    "guides/troubleshooting": ("error messages", "errors", "help", "报错", "错误", "常见问题"),
    "operations": ("resume", "interrupted", "killed", "memory budget", "断点续转", "内存"),
    "parity": ("loss curve", "same loss", "损失"),
    "report": ("html report", "visualization", "可视化", "报告"),
}
"""Page → what else its readers search for, in both languages."""

_HAN = r"[\u3400-\u9fff]"
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)")


class Bigrams(SearchEnglish):
    """English words, and Chinese as pairs of neighbouring characters, which need no dictionary."""

    lang = "bigrams"
    js_splitter_code = """
var splitQuery = (query) => query.split(/[^\\p{Letter}\\p{Number}_]+/gu).flatMap((term) =>
  (term.match(/[\\u3400-\\u9fff]+|[^\\u3400-\\u9fff]+/g) || []).flatMap((run) =>
    run.length > 1 && /[\\u3400-\\u9fff]/.test(run) ? [...run].slice(1).map((next, at) => run[at] + next) : [run]));
"""

    def split(self, input: str) -> list[str]:
        """The words of a text.

        >>> Bigrams({}).split("换卡数 with tp=2")
        ['换卡', '卡数', 'with', 'tp', '2']
        """
        words = []
        for term in super().split(input):
            for run in re.findall(rf"{_HAN}+|(?:(?!{_HAN}).)+", term):
                pairs = [run[at : at + 2] for at in range(len(run) - 1)] if re.match(_HAN, run) else []
                words += pairs or [run]
        return words

    def word_filter(self, stemmed_word: str) -> bool:
        """Whether a word is worth finding; a pair of characters is."""
        return re.match(_HAN, stemmed_word) is not None or super().word_filter(stemmed_word)


def is_chinese(app: Sphinx) -> bool:
    """Whether this is the Chinese site, which lies in ``zh`` below the English one."""
    return app.config.language.startswith("zh")


def with_synonyms(app: Sphinx, page: str, source: list[str]) -> None:
    """Let the search find a page by what it is also called."""
    entries = "".join(f"```{{index}} ! single: {synonym}\n```\n" for synonym in SYNONYMS.get(page, ()))
    # Above the title of a translation stands what it was made from, in a comment.
    source[0] = re.sub(r"\A((?:<!--.*-->\n)?# .*\n)", lambda title: f"{title[1]}\n{entries}", source[0])


def to_other_sites(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to what is no page of this site lead to the repository, or from the Chinese to the English site."""
    chinese = is_chinese(app)
    folder = posixpath.join("zh" if chinese else "", posixpath.dirname(page))

    def led(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        name = posixpath.normpath(posixpath.join(folder, path))
        is_page = name.endswith(".md") and not name.startswith("../")
        if name.startswith("pictures/") or (is_page and name.startswith("zh/") == chinese):
            return match[0]
        if is_page:
            up = "../" * (page.count("/") + chinese)
            return f'<a href="{up}{name.removesuffix(".md")}.html{anchor}">{text}</a>'
        if not REPOSITORY:
            return text
        return f"[{text}]({REPOSITORY}/blob/main/{posixpath.normpath(posixpath.join('docs', name))}{anchor})"

    source[0] = _LINK.sub(led, source[0])


class OnlySynonyms(SphinxTransform):
    """Keeps what stands in an index for other reasons, such as every option, from the end of all search results."""

    default_priority = 800  # before Sphinx collects entries

    def apply(self, **_: Any) -> None:
        """Remove all entries that are not synonyms."""
        for node in self.document.findall(addnodes.index):
            node["entries"] = [entry for entry in node["entries"] if entry[3] == "main"]


def without_sidebar(app: Sphinx, config: Config) -> None:
    """Let the Chinese site, whose pages are all in the navigation above, have no further one at the side."""
    if is_chinese(app):
        config["html_sidebars"] = {"**": []}


def with_counterpart(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Tell the frame where the same page is in the other language; its first page if there is none."""
    chinese = is_chinese(app)
    there = HERE if chinese else HERE / "zh"
    same = page if (there / f"{page}.md").exists() else "index"
    up = "../" * (page.count("/") + chinese)
    context["counterpart"] = f"{up}{'' if chinese else 'zh/'}{same}.html"
    context["counterpart_language"] = ("en", "English") if chinese else ("zh-CN", "中文")


def with_names(
    app: Sphinx,
    what: str,
    name: str,
    documented: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """A signature that can be parsed: a function that is a default is called by its name."""
    return signature and re.sub(r"<function (\w+)>", r"\1", signature), returns


def setup(app: Sphinx) -> None:
    """Connect what is above with Sphinx, which calls this."""
    app.connect("autodoc-process-signature", with_names)
    app.add_search_language(Bigrams)
    app.add_transform(OnlySynonyms)
    app.connect("config-inited", without_sidebar)
    app.connect("source-read", to_other_sites)
    app.connect("source-read", with_synonyms)
    app.connect("html-page-context", with_counterpart)
