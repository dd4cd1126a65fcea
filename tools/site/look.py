"""Opens every page of the built site in Chromium, at the width of a desktop and of a telephone.

    make site && python tools/site/look.py [--pictures FOLDER] [--only NAME]

Needs `pip install playwright` and a Chromium (`apt install chromium`, or `playwright install
chromium`). Exits with 1 if a page scrolls sideways, asks for anything that is not on the site,
prints an error, has code in letters below 11 px on a telephone, or if the first page takes a
second or longer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
WIDTHS = {"desktop": (1280, 800), "phone": (390, 844)}
SECONDS_OF_FIRST_PAGE = 1.0
PIXELS_OF_CODE = 11

# What the page looks like to a reader: what sticks out of it, and the least size of code.
LOOK = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = e => {
    for (; e && e !== document.body; e = e.parentElement)
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  const out = [...document.querySelectorAll('article *')].filter(e =>
    e.getBoundingClientRect().right > width + 1 && !scrolls(e));
  const code = [...document.querySelectorAll('article pre code')];
  return {
    wide: document.documentElement.scrollWidth - width,
    out: out.slice(0, 3).map(e => e.tagName + ': ' + e.textContent.slice(0, 60)),
    code: Math.min(99, ...code.map(e => parseFloat(getComputedStyle(e).fontSize))),
  };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the browser has gone to the next page
            super().copyfile(source, outputfile)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the folder's files on the loopback, as long as the block runs."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def complaints(site: Path, pictures: Path | None = None, only: str = "") -> list[str]:
    """What is wrong with the pages, one line each."""
    from playwright.sync_api import sync_playwright

    found: list[str] = []
    pages = sorted(each.relative_to(site).as_posix() for each in site.rglob("*.html"))
    pages = [each for each in pages if only in each and each != "404.html"]
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, height) in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("pageerror", lambda error, asked=asked: asked.append(f"error: {error}"))
            for path in pages:
                asked.clear()
                page.goto(address + path, wait_until="load")
                look = page.evaluate(LOOK)
                elsewhere = [
                    each for each in asked if not each.startswith((address, "data:", "blob:"))
                ]
                found += [f"{path} at {width} px: asks for {each}" for each in elsewhere]
                if look["wide"] > 0:
                    found.append(f"{path} at {width} px: scrolls sideways by {look['wide']} px")
                found += [f"{path} at {width} px: sticks out: {each}" for each in look["out"]]
                if look["code"] < PIXELS_OF_CODE:
                    found.append(f"{path} at {width} px: code of {look['code']} px")
                if pictures:
                    pictures.mkdir(parents=True, exist_ok=True)
                    stem = path.removesuffix(".html").replace("/", "-")
                    page.screenshot(path=pictures / f"{stem}-{name}.png")
            page.close()
        seconds = first_page(browser, address)
        print(f"first page: {seconds * 1000:.0f} ms; {len(pages)} pages at {len(WIDTHS)} widths")
        if seconds >= SECONDS_OF_FIRST_PAGE:
            found.append(f"the first page takes {seconds:.2f} s")
        browser.close()
    return found


def first_page(browser: Any, address: str) -> float:
    """Seconds to load the first page by a browser that has nothing of it; the best of three."""
    times = []
    for _ in range(3):
        context = browser.new_context()
        page = context.new_page()
        page.goto(address + "index.html", wait_until="load")
        times.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        context.close()
    return float(min(times)) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each page")
    parser.add_argument("--only", default="", help="pages whose path contains this")
    arguments = parser.parse_args()
    found = complaints(SITE, arguments.pictures, arguments.only)
    print("\n".join(found) or "nothing to complain about")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
