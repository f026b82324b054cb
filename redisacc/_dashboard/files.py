"""The files of the page."""

from __future__ import annotations

from pathlib import Path

_STATIC = Path(__file__).parent / "static"

PAGE = _STATIC / "page.html"
LOGIN = _STATIC / "login.html"
# Name → file, of those that the page refers to. They hold nothing secret.
FILES = {name: _STATIC / name for name in ("dashboard.css", "dashboard.js", "icon.svg")}
