"""Hooks of the documentation site: equations as MathML, tables of settings, and pages from the repository's root.

Equations become MathML when the site is built, so that no page loads a script for them.
"""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from selftpt import config as configs

ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
SETTINGS = re.compile(r"^<!-- settings: (\w+) -->$", re.M)
EQUATION = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are outside the docs folder."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links of the root's pages relative to the docs folder, and insert tables of settings."""
    if page.file.src_uri in ROOT_PAGES:
        markdown = markdown.replace("](docs/", "](")
    return SETTINGS.sub(lambda match: settings_table(getattr(configs, match[1])), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace the equations of a page by MathML."""
    return EQUATION.sub(lambda match: to_mathml(match[2], match[1] == "div"), content)


def to_mathml(equation: str, block: bool) -> str:
    """Convert an equation as `pymdownx.arithmatex` leaves it, between \\( and \\) or \\[ and \\], to MathML."""
    latex = (
        html.unescape(equation).strip().removeprefix("\\[" if block else "\\(").removesuffix("\\]" if block else "\\)")
    )
    return convert(latex.strip(), display="block" if block else "inline")


def settings_table(kind: type[Any]) -> str:
    """Make a Markdown table of the fields of a configuration class, with their help texts."""
    rows = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        made = field.default_factory is not dataclasses.MISSING
        default = "its own defaults" if made else f"`{field.default!r}`"
        rows.append(f"| `{field.name}` | `{field.type}` | {default} | {field.metadata.get('help', '')} |")
    return "\n".join(rows)
