"""Markdown as one HTML page that loads nothing: styles and images are inside, text is never code."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from html import escape
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy of the page: the browser itself refuses whatever is not in the file."""
STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #fff; --line: #d1d9e0; --soft: #f6f8fa; --link: #0a58ca;
  --warn: #9a6700; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #15181c; --line: #3a4048; --soft: #20252b; --link: #7db3ff; --warn: #e3b341; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0 auto;
  max-width: 62rem; padding: 1.5rem; }
h1, h2, h3 { line-height: 1.25; margin: 2em 0 .6em; }
h1 { margin-top: .5em; }
h2 { border-bottom: 1px solid var(--line); padding-bottom: .3em; }
a { color: var(--link); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5em 0 1em; }
th, td { border: 1px solid var(--line); padding: .3em .6em; min-width: 3rem; }
td:first-child:has(+ [style*=right]), td:first-child:has(+ td + [style*=right]) { min-width: 11rem; }
[style*=right] { white-space: nowrap; }
th { background: var(--soft); }
th:empty { padding: 0; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
blockquote { margin: 1em 0; padding: .2em 1em; border-left: 4px solid var(--warn); background: var(--soft); }
code { background: var(--soft); padding: .1em .3em; border-radius: 4px; }
pre { overflow-x: auto; background: var(--soft); padding: .8em; border-radius: 6px; }
pre code { padding: 0; }
"""


def parser() -> MarkdownIt:
    """CommonMark with tables; HTML in the text stays text."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def page(markdown: str, images: Mapping[str, bytes], title: str) -> str:
    """A complete HTML document.

    `images` maps the names that the Markdown refers to, to PNG bytes. An image that is not among them is not loaded from
    elsewhere: its description stands in its place.
    """
    renderer = parser()
    renderer.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    renderer.add_render_rule("table_close", lambda *_: "</table></div>\n")

    def image(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        alt = escape(self.renderInlineAsText(tokens[index].children, options, env))
        data = images.get(tokens[index].attrs["src"])
        if data is None:
            return f"[image: {alt}]"
        return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'

    renderer.add_render_rule("image", image)
    tokens = renderer.parse(markdown)
    for heading, inline in pairwise(tokens):
        if heading.type == "heading_open" and heading.tag == "h2":  # others recur in every setting
            heading.attrs["id"] = anchor(inline.content)
    body = renderer.renderer.render(tokens, renderer.options, {})
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def anchor(heading: str) -> str:
    """The id of a heading, as code hosts form it: lower case, punctuation gone, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def demote(markdown: str, level: int) -> str:
    """The same Markdown with its highest heading at `level` and the others in proportion; `#` in code stays."""
    headings = [token for token in parser().parse(markdown) if token.type == "heading_open" and token.level == 0]
    if not headings:
        return markdown
    shift = level - min(int(token.tag[1]) for token in headings)
    lines = markdown.splitlines()
    for token in reversed(headings):
        first, end = token.map or (0, 0)
        text = " ".join(line.strip() for line in lines[first:end])
        if token.markup in "=-":  # underlined: the line below belongs to the heading
            text = " ".join(line.strip() for line in lines[first : end - 1])
        hashes = "#" * min(int(token.tag[1]) + shift, 6)
        lines[first:end] = [f"{hashes} {text.lstrip('#').strip()}"]
    return "\n".join(lines) + "\n"
