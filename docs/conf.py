"""How Sphinx builds the documentation: `make docs`."""

from importlib.metadata import version as installed_version

project = "pipeloom"
author = "The pipeloom authors"
version = release = installed_version("pipeloom")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"

html_theme = "furo"
html_title = "pipeloom"
