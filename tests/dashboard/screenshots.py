"""Takes the pictures of the dashboard for the documentation: `make screenshots`.

Several trainings run for half a minute on a server of their own, then a browser opens the page.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import redis
from browser import chromium
from scene import trainings

from redisacc.embedded import Server

IMAGES = Path(__file__).parents[2] / "docs" / "images"
# Name → colors, width and height.
PICTURES = {
    "dashboard": ("light", 1280, 1010),
    "dashboard-dark": ("dark", 1280, 1010),
    "dashboard-phone": ("light", 390, 844),
    "dashboard-phone-dark": ("dark", 390, 844),
}


def main():
    """Runs the trainings, and takes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=IMAGES, help="the folder")
    parser.add_argument("--only", choices=PICTURES, nargs="+", default=["dashboard"])
    parser.add_argument("--seconds", type=float, default=30, help="how long the trainings run before the pictures")
    options = parser.parse_args()
    with Server() as server, redis.Redis.from_url(server.url) as client, trainings(server.url):
        client.config_set("maxmemory", 256 * 1024 * 1024)
        words = [sys.executable, "-m", "redisacc", "serve", "--port", "0", "--redis", server.url]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as served:
            try:
                assert served.stdout is not None
                url = served.stdout.readline().partition(" at ")[2].split()[0]
                time.sleep(options.seconds)
                take(url, options.only, options.into)
            finally:
                served.send_signal(2)


def take(url, names, folder):
    """Takes pictures of a page that is being served."""
    with chromium() as browser:
        for name in names:
            colors, width, height = PICTURES[name]
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colors)
            page.goto(url)
            page.wait_for_selector("#rows tr")
            page.get_by_role("button", name="resnet-50").click()
            page.wait_for_selector("#curves polyline")
            page.wait_for_selector("#rounds tr")
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / f"{name}.png")
            page.close()


if __name__ == "__main__":
    main()
