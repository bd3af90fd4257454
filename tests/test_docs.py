"""Examples in README.md and docs/ run, links are valid, and the site loads nothing from the web."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

import selftpt
from tests.helpers.commands import Run
from tests.helpers.hub_server import use_hub
from tests.helpers.image_files import noise

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
SHELL = ("bash", "console", "sh")
LANGUAGES = ("python", *SHELL, "text", "json", "csv", "")
MOST_NOT_RUN = 20  # on all pages together


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the reason why it is not run, if any."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        marker = NOT_RUN.search(text[: match.start()])
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.M)
        line = text[: match.start()].count("\n") + 1
        found.append(Block(page, line, match["language"], code, marker[1] if marker else None))
    return found


BLOCKS = {page: blocks_of(page) for page in PAGES}
EXAMPLES = [page for page in PAGES if any(b.language in ("python", *SHELL) and not b.not_run for b in BLOCKS[page])]


def make_images(folder: Path) -> None:
    """Create the files that the examples use."""
    classes = ("golden retriever", "rabbit", "red fox", "tabby cat")
    paths = [folder / "photos" / name / f"{i}.jpg" for name in classes for i in range(4)]
    paths += [folder / name for name in ("a.jpg", "b.jpg", "holiday/1.jpg", "holiday/beach/2.jpg")]
    for seed, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        noise(seed).convert("RGB").resize((48, 40), Image.Resampling.NEAREST).save(path)


def simple_commands(code: str) -> list[list[str]] | None:
    """Return the arguments of each command of a shell block, or None if it has anything but plain calls of selftpt."""
    commands = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        parts = list(words)
        if not parts:
            continue
        if parts[0] != "selftpt" or any(set(part) <= set("();<>|&") for part in parts) or "$" in line:
            return None
        commands.append(parts[1:])
    return commands


def run_shell(block: Block, run: Run, folder: Path) -> None:
    """Run a shell block, if possible in this process, because importing torch takes seconds."""
    code = re.sub(r"^\$ ", "", block.code, flags=re.M)
    commands = simple_commands(code)
    if commands is not None:
        for arguments in commands:
            answer = run(*arguments)
            assert answer.code == 0, f"{block.place}: selftpt {shlex.join(arguments)}\n{answer.err}"
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{block.place}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::selftpt.SelfTPTWarning")
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    make_images(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("docs_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(selftpt.METHODS, "info", dict(selftpt.METHODS.info))
    with use_hub(tmp_path / "hub", monkeypatch):
        for block in BLOCKS[page]:
            if block.not_run:
                continue
            if block.language == "python":
                source = "\n" * block.line + block.code  # tracebacks show the line of the page
                exec(compile(source, str(page), "exec"), module.__dict__)
            elif block.language in SHELL:
                run_shell(block, run, tmp_path)


def test_examples_that_are_not_run_have_a_reason_and_are_few() -> None:
    skipped = [block for blocks in BLOCKS.values() for block in blocks if block.not_run]
    assert [block.place for block in skipped if len(str(block.not_run).split()) < 2] == []
    assert len(skipped) <= MOST_NOT_RUN, "\n".join(f"{block.place}: {block.not_run}" for block in skipped)


def test_every_marker_precedes_a_block() -> None:
    for page in PAGES:
        markers = page.read_text(encoding="utf-8").count("<!-- not run:")
        assert markers == sum(block.not_run is not None for block in BLOCKS[page]), page


def test_command_blocks_have_a_language() -> None:
    blocks = [block for blocks in BLOCKS.values() for block in blocks]
    assert [block.place for block in blocks if block.language not in LANGUAGES] == []
    command = re.compile(r"^(\$ )?(selftpt|pip|make|python|import|from) ", re.M)
    assert [b.place for b in blocks if b.language in ("", "text") and command.search(b.code)] == []


def test_not_run_marker_applies_to_its_block_only(tmp_path: Path) -> None:
    page = ROOT / "docs" / "index.md"
    text = "<!-- not run: needs a GPU -->\n```python\na\n```\n\n```bash\nb\n```\n- c\n\n  ```sh\n  d\n  ```\n"
    file = tmp_path / "page.md"
    file.write_text(text)
    found = [(block.language, block.code, block.not_run, block.line) for block in blocks_of(file)]
    assert found == [
        ("python", "a\n", "needs a GPU", 2),
        ("bash", "b\n", None, 6),
        ("sh", "d\n", None, 11),
    ]
    assert page in PAGES


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("selftpt cache  # list\nselftpt learn 'a b'\n", [["cache"], ["learn", "a b"]]),
        ("selftpt cache | cat\n", None),
        ("selftpt cache > out\n", None),
        ("selftpt cache &\n", None),
        ("selftpt bench $M\n", None),
        ("find .\n", None),
    ],
)
def test_only_plain_commands_run_in_process(code: str, expected: list[list[str]] | None) -> None:
    assert simple_commands(code) == expected


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_are_valid(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        parts = urlsplit(target)
        if parts.scheme:
            assert parts.scheme == "https", target
            assert "." in parts.netloc, target
            continue
        file = (page.parent / parts.path).resolve() if parts.path else page
        assert file.is_file(), f"{page.name}: {target}"
        if parts.fragment:
            assert parts.fragment in anchors(file), f"{page.name}: {target}"


class Resources(HTMLParser):
    """Collects the resources that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [values[name] or "" for name in ("src", "srcset") if name in values]
        if tag == "link" and values.get("rel") != "canonical":
            self.found.append(values.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site in strict mode."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.mark.slow
def test_site_loads_nothing_from_the_web(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        parser = Resources()
        text = page.read_text(encoding="utf-8")
        parser.feed(text)
        assert parser.found
        assert [url for url in parser.found if "//" in url] == [], page
        assert 'class="mermaid"' not in text, page  # the theme would load its script from the web


@pytest.mark.slow
def test_site_documents_the_complete_public_api(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    for name in selftpt.__all__:
        if name not in ("METHODS", "__version__"):
            assert re.search(rf'id="selftpt\.[\w.]*\b{name}"', text), name
    assert "METHODS" in text


@pytest.mark.slow
def test_site_renders_equations_and_settings(site: Path) -> None:
    pages = {str(page.relative_to(site)): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert not [name for name, text in pages.items() if 'class="arithmatex"' in text]
    assert "number of context vectors" in pages["reference/settings.html"]


def test_equations_become_mathml() -> None:
    hooks = pytest.importorskip("tools.docs_hooks")
    content = '<p><span class="arithmatex">\\(a &lt; b\\)</span></p><div class="arithmatex">\\[\\frac{1}{n}\\]</div>'
    found = hooks.on_page_content(content)
    assert found.count("<math") == 2
    assert 'display="inline"' in found
    assert 'display="block"' in found
    assert "<mfrac>" in found
    assert "arithmatex" not in found
