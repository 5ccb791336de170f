"""Pages as a browser lays them out, in windows of several widths."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

FRAMES = """<!doctype html><meta charset=utf-8><body>%s<pre id=found></pre><script>
onload = () => {
  const cut = frame => {
    const page = frame.contentDocument, width = page.documentElement.clientWidth;
    const clips = e => getComputedStyle(e).overflowX !== "visible";
    const scrolls = e => e && e !== page.body && (clips(e) || scrolls(e.parentElement));
    const over = [...page.querySelectorAll("body *")].filter(
      e => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement));
    return [page.scrollingElement.scrollWidth - width, over.map(e => e.tagName + " " + e.textContent.slice(0, 40))];
  };
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(cut));
};
</script>"""


def over_the_edge(pages: Sequence[str | Path], widths: Sequence[int], folder: Path) -> list[tuple[int, list[str]]]:
    """For every page in every width: pixels by which it is wider than its window, and the elements to blame.

    Args:
        pages: HTML, or files.
        widths: of the windows, in pixels.
        folder: for what the browser writes.
    """
    assert BROWSER is not None
    frames = []
    for page in pages:
        source = f'src="{page.as_uri()}"' if isinstance(page, Path) else f'srcdoc="{html.escape(page)}"'
        frames += [f'<iframe style="border:0;width:{width}px;height:900px" {source}></iframe>' for width in widths]
    (folder / "frames.html").write_text(FRAMES % "".join(frames), encoding="utf-8")
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *quiet, "--allow-file-access-from-files", "--dump-dom", (folder / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r"<pre id=.?found.?>(.*?)</pre>", done.stdout, re.S)
    assert found, done.stderr[-2000:]
    measured = [(more, blamed) for more, blamed in json.loads(html.unescape(found[1]))]
    assert len(measured) == len(frames)
    return measured
