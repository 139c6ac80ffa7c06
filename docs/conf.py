"""The site, built by `make docs`. dependencies.md says why Sphinx, furo and MyST."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

project = "shardstep"
copyright = "the shardstep developers"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "shardstep"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 4
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"  # what is between single backticks, as everywhere in our docstrings

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def _stay_inside(app: Any, name: str, source: list[str]) -> None:
    """Links that leave docs/: the pages are read in the repository as well, where they lead to files.

    Results of benchmarks are pages here, too; of other files only the name is shown.
    """
    if name.startswith("results/"):
        return

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, _, anchor = target.partition("#")
        if path == "README.md":
            return f"[{text}](index.md)"
        if path.startswith("benchmarks/results/") and path.endswith(".md"):
            return f"[{text}](results/{Path(path).name}{'#' + anchor if anchor else ''})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    source[0] = _LINK.sub(replace, source[0])


def _show_examples(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """In our docstrings an indented block after a line of text is code, as in Markdown."""
    shown: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and (not shown or not shown[-1].strip()):
            shown += [".. code-block:: python", ""]
            inside = True
        elif line.strip() and not indented:
            inside = False
        shown.append(line)
    lines[:] = shown


def _copy_results(app: Any) -> None:
    """Pages of benchmarks/results; the folder is made anew with every build, and ignored by git."""
    folder = Path(app.srcdir, "results")
    folder.mkdir(exist_ok=True)
    names = sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("*.md"))
    for name in names:
        text = (ROOT / "benchmarks" / "results" / name).read_text()
        title, _, rest = text.partition("\n")
        _write_if_changed(folder / name, f"{title}: {Path(name).stem}\n{rest}")
    listed = "\n".join(Path(name).stem for name in names)
    _write_if_changed(
        folder / "index.md", f"# Results of benchmarks\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    )


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def setup(app: Any) -> None:
    app.connect("builder-inited", _copy_results)
    app.connect("source-read", _stay_inside)
    app.connect("autodoc-process-docstring", _show_examples, priority=900)  # after napoleon
