"""Finds and starts Chromium, for tests and pictures of the page."""

import contextlib
import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NoBrowserError(Exception):
    """This machine has no browser, or nothing that drives one. The message says what to install."""


@contextlib.contextmanager
def chromium():
    """Yields a browser without a window.

    Raises:
        NoBrowserError: there is none.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoBrowserError("playwright is missing: `make dashboard` installs it") from None
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoBrowserError("there is no Chromium: apt-get install chromium, or set CHROMIUM to its path")
    with sync_playwright() as playwright:
        # Chromium refuses to run as root with its sandbox. The page is ours.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=options)
        try:
            yield browser
        finally:
            browser.close()
