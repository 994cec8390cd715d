"""How `make docs` builds these pages: MyST Markdown, the Furo theme, and the reference from the docstrings.

Docstrings follow numpydoc and are also read in a terminal: names are in `backticks`, and some docstrings have tables of
arguments aligned in columns. The hook below makes links of the names and definition lists of the tables; napoleon turns
the sections into reStructuredText.
"""

import inspect
import re
import sys
from pathlib import Path

from sphinx.ext.napoleon import Config, NumpyDocstring

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pagepool  # noqa: E402

project = "pagepool"
copyright = "the authors of pagepool"
version = release = pagepool.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = True
smartquotes = False
# The pages are built without them.
autodoc_mock_imports = ["ray", "starlette", "torch", "tqdm", "transformers"]
html_theme = "furo"
html_title = "pagepool"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_show_sphinx = False
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
toc_object_entries_show_parents = "hide"

ROW = re.compile(r"(?P<names>[a-z_][\w, ]*?) {2,}(?P<text>\S.*)")
SECTION = re.compile(r"-{3,}")
# Types and exceptions are prose ("sequence of int or integer array"), not names to link.
NUMPYDOC = Config(
    napoleon_use_param=False, napoleon_use_rtype=False, napoleon_custom_sections=[("Raises", "returns_style")]
)
CODE = re.compile(r"`([^`\n]+)`")


def members_of(thing):
    """The public methods and properties of a class that have a docstring, those of its bases included."""
    found = {name: inspect.getattr_static(thing, name) for name in dir(thing) if not name.startswith("_")}
    return {name for name, member in found.items() if hasattr(member, "__get__") and inspect.getdoc(member)}


MEMBERS = {name: members_of(thing) for name, thing in vars(pagepool).items() if isinstance(thing, type)}
NAMES = {name for name in pagepool.__all__ if not name.startswith("__")}


def literal_or_link(text, owner):
    """`text` of a docstring as a link to what it names, where these pages have that, else as a literal."""
    name = text.removesuffix("()")
    scope, _, member = name.partition(".")
    if name in NAMES:
        kind = "class" if inspect.isclass(getattr(pagepool, name)) else "func"
        return f":py:{kind}:`~pagepool.{name}`"
    if not member and name in MEMBERS.get(owner, ()):
        scope, member = owner, name
    if member in MEMBERS.get(scope, ()):
        shown = name if scope != owner else member
        return f":py:obj:`{shown} <pagepool.{scope}.{member}>`"
    return f"``{text}``"


def prose(line, owner):
    """One line of a docstring outside of examples: marks escaped, names in backticks linked."""
    parts = CODE.split(line)
    plain = [re.sub(r"([\\*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    code = [literal_or_link(part, owner) for part in parts[1::2]]
    text = plain[0]
    for made, after in zip(code, plain[1:], strict=True):
        # A role ends where a blank or punctuation follows: "`Scheduler`s" needs a separator that is not shown.
        text += made + (r"\ " if after[:1].isalnum() else "") + after
    return text


def table_rows(paragraph):
    """The rows (names, lines of text) of an aligned table, or None for a paragraph of prose."""
    rows, column = [], 0
    for line in paragraph:
        row = ROW.fullmatch(line)
        if row and not line.startswith(" "):
            rows.append((row["names"], [row["text"]]))
            column = row.start("text")
        elif rows and line.startswith(" ") and len(line) - len(line.lstrip()) <= column:
            rows[-1][1].append(line.strip())
        else:
            return None
    return rows


def rewrite(lines, owner):
    """The lines of a docstring as reStructuredText."""
    paragraphs = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.rstrip())
        else:
            paragraphs.append([])
    made = []
    for paragraph in filter(None, paragraphs):
        rows = table_rows(paragraph)
        if paragraph[0].startswith(">>>"):
            made += paragraph
        elif rows:
            for names, text in rows:
                made += [", ".join(f"``{name.strip()}``" for name in names.split(","))]
                made += ["   " + prose(line, owner) for line in text]
        elif all(line.startswith("    ") for line in paragraph):
            made += ["::", "", *paragraph]
        else:
            made += [prose(line.strip(), owner) for line in paragraph]
        made.append("")
    return made


def link(lines, owner):
    """The lines of numpydoc sections with their names linked; indentation, examples and literal blocks stay."""
    made, example, before = [], False, ""
    for line in lines:
        text = line.lstrip()
        example = bool(text) and (example or text.startswith(">>>") or before.endswith("::"))
        before = text or before
        made.append(line if example else line[: len(line) - len(text)] + prose(text, owner))
    return made


def process_docstring(app, what, name, obj, options, lines):
    owner = name.removeprefix("pagepool.").split(".")[0]
    first = next((i - 1 for i, line in enumerate(lines) if SECTION.fullmatch(line)), len(lines))
    sections = NumpyDocstring(link(lines[first:], owner), NUMPYDOC, app, "method", name, obj, options).lines()
    lines[:] = [*rewrite(lines[:first], owner), *sections]


def setup(app):
    app.connect("autodoc-process-docstring", process_docstring)
