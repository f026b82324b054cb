"""Configures Sphinx for ``make docs``. The pages are plain Markdown, because people read them on GitHub as well."""

import re
import sys
from pathlib import Path

import redisacc

sys.path.insert(0, str(Path(__file__).parent))

import terms

project = "redisacc"
author = "The redisacc authors"
project_copyright = "The redisacc authors"
version = release = redisacc.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# Lets Sphinx check links to headings (`semantics.md#numbers`).
myst_heading_anchors = 4

html_theme = "furo"
html_title = "redisacc"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["manual.css"]

# Docstrings enclose code in one pair of backticks or in two; both mean code.
default_role = "code"
# redisacc.torch is documented where torch is missing.
autodoc_mock_imports = ["torch", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Shows these aliases by name, because the unions behind them would fill a page.
autodoc_type_aliases = {
    "npt.ArrayLike": "ArrayLike",
    "npt.DTypeLike": "DTypeLike",
    "Array": "ndarray",
    "Shape": "Shape",
}
napoleon_numpy_docstring = False
# Lists the "Attributes:" of a class in its text only; as members they would appear a second time.
napoleon_use_ivar = True
add_module_names = False


def _by_name(*event):
    """Replaces the repr of a forward reference, which Sphinx shows for an alias in a union or tuple, by its name."""
    *_, signature, returns = event
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, returns))


def setup(app):
    app.connect("autodoc-process-signature", _by_name)
    app.connect("doctree-resolved", terms.link)
