"""Hooks of the documentation site: equations as MathML, tables of settings, and pages from outside docs/.

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

# Pages outside docs/, by their name on the site.
OTHER_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "embedded-model-recipe.md": "tools/embedded_model/README.md",
}
SETTINGS = re.compile(r"^<!-- settings: (\w+) -->$", re.M)
EQUATION = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for page, source in OTHER_PAGES.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt the links from and to pages outside docs/, and insert tables of settings."""
    if page.file.src_uri in OTHER_PAGES:
        markdown = re.sub(r"\]\((\.\./)*docs/", "](", markdown)
    for name, source in OTHER_PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return SETTINGS.sub(lambda match: settings_table(getattr(configs, match[1])), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert the equations of a page to MathML."""
    return EQUATION.sub(lambda match: to_mathml(match[2], match[1] == "div"), content)


def to_mathml(equation: str, block: bool) -> str:
    """Convert the output of `pymdownx.arithmatex`, LaTeX between \\( and \\) or \\[ and \\], to MathML."""
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
