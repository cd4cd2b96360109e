"""Sphinx: MyST pages, the pydata theme, the API from docstrings. A warning is an error (see the Makefile)."""

import sys
from pathlib import Path

from sparta.version import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "SparTA"
author = "The SparTA authors"
copyright = "2026, The SparTA authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
extensions += ["support"]  # beside this file: tables from the registries
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = False
nitpicky = False

html_theme = "pydata_sphinx_theme"
html_title = "SparTA"
html_static_path = ["_static"]
html_css_files = ["sparta.css"]
html_sidebars: dict[str, list[str]] = {"index": [], "performance": [], "contributing": []}  # without pages below them
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 7,
    "show_nav_level": 2,
    "show_toc_level": 2,
}
