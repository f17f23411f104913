"""Make docs/report.png, the top of a report, and docs/view.png, a group in the viewer, from a finished quickstart.

    .venv/bin/python scripts/screenshots.py                       # of outputs/quickstart
    .venv/bin/python scripts/screenshots.py RUN --out FOLDER

Needs Chromium (`apt-get install chromium`). The group has right and wrong answers and a failed call, and of all such
groups the most different answers; the first one if several do.
"""

import argparse
import asyncio
import base64
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from tests.unit.view import chromium  # noqa: E402
from tests.unit.view.served import served  # noqa: E402
from verl_ext.report.page import write_report  # noqa: E402
from verl_ext.view.app import address  # noqa: E402
from verl_ext.view.data import Run  # noqa: E402

WIDTH, SHARPNESS = 1200, 2  # of a page in CSS pixels; pixels of the picture per CSS pixel
REPORT_HEIGHT, VIEW_HEIGHT = 1640, 1200  # at most
GROUP = """SELECT key, uid FROM records WHERE NOT validate GROUP BY ALL
    HAVING max(acc) = 1 AND min(acc) = 0 AND sum(len(list_filter(calls, lambda c: c.fault IS NOT NULL))) > 0
    ORDER BY count(DISTINCT verdict.normalised) DESC, key, uid LIMIT 1"""


async def take(pages: dict[Path, tuple[str, int]]) -> None:
    """Write a picture of each page: file -> (address, greatest height)."""
    with tempfile.TemporaryDirectory() as profile:
        async with chromium.browser(Path(profile)) as tab:
            await tab.call("Emulation.setScrollbarsHidden", hidden=True)
            for file, (page, most) in pages.items():
                size = {"width": WIDTH, "height": most, "deviceScaleFactor": SHARPNESS}
                await tab.call("Emulation.setDeviceMetricsOverride", mobile=False, **size)
                await tab.open(page)
                height = min(most, await tab.js("document.body.scrollHeight"))
                area = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
                found = await tab.call("Page.captureScreenshot", clip=area)
                file.write_bytes(base64.b64decode(found["data"]))
                print(f"{file}: {SHARPNESS * WIDTH} x {SHARPNESS * height}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=REPO / "outputs" / "quickstart", metavar="RUN")
    parser.add_argument("--out", type=Path, default=REPO / "docs", help="folder of the pictures (default: docs)")
    args = parser.parse_args()
    if chromium.PROGRAM is None:
        sys.exit("screenshots: no Chromium was found. Install it, e.g. apt-get install chromium.")
    try:
        write_report(args.run)
        groups = Run(args.run, args.run.name, 0).ask(GROUP)
    except (OSError, ValueError) as error:
        sys.exit(f"screenshots: {error}")
    if not groups:
        sys.exit(f"screenshots: {args.run} has no group with right and wrong answers and a failed call")
    with served(args.run) as viewer:
        group = address(f"{viewer}/run/0/{groups[0]['key']}/group", uid=groups[0]["uid"])
        pages = {"report.png": ((args.run / "report.html").resolve().as_uri(), REPORT_HEIGHT)}
        pages |= {"view.png": (group, VIEW_HEIGHT)}
        asyncio.run(take({args.out / name: page for name, page in pages.items()}))


if __name__ == "__main__":
    main()
