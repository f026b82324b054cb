"""How Sphinx builds these pages: ``make docs``. They can be read on GitHub, too, so they are plain Markdown."""

import re

import redisacc

project = "redisacc"
author = "The redisacc authors"
copyright = "The redisacc authors"
version = release = redisacc.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# So that links to headings (`semantics.md#numbers`) are checked.
myst_heading_anchors = 3

html_theme = "furo"
html_title = "redisacc"
html_copy_source = False

# Docstrings write `names` with one pair of backticks here and two there; both mean code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# By name; the unions behind them fill a page.
autodoc_type_aliases = {
    "npt.ArrayLike": "ArrayLike",
    "npt.DTypeLike": "DTypeLike",
    "Array": "ndarray",
    "Shape": "Shape",
}
napoleon_numpy_docstring = False
# "Attributes:" of a class as a list in its text; each of them again as a member would be said twice.
napoleon_use_ivar = True
add_module_names = False


def _by_name(*event):
    """Aliases in unions and tuples come out as the repr of what stands for them."""
    *_, signature, returns = event
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, returns))


def setup(app):
    app.connect("autodoc-process-signature", _by_name)
