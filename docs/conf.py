"""How `make docs` builds these pages: Markdown by MyST, the Furo theme, and the reference from numpydoc docstrings."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pagepool  # noqa: E402

project = "pagepool"
copyright = "the authors of pagepool"
version = release = pagepool.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
smartquotes = False

# A name in `backticks` becomes a link where these pages document it, and stays code elsewhere. Types in docstrings are
# prose, such as "sequence of int", so only names that begin with "pagepool." must be found.
default_role = "py:obj"
nitpicky = True
nitpick_ignore = [
    ("py:class", "pagepool.prefix.checkpoint_index.Stop"),
    ("py:class", "pagepool.memory.hybrid.HeldSlot"),
    ("py:class", "pagepool.engine.intake.Request"),
    ("py:class", "pagepool.memory.block_refs.BlockRefs"),
]
nitpick_ignore_regex = [("py:.*", r"(?!pagepool\.).*")]

napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True

autodoc_mock_imports = ["ray", "starlette", "torch", "tqdm", "transformers"]  # the pages are built without them
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "pagepool"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_show_sphinx = False
