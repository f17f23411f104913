#!/usr/bin/env python3
"""Draw docs/explanation/architecture.svg: the path of a response through the system, with the folder of each part."""

import argparse
import sys
from pathlib import Path

from markupsafe import escape

OUT = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "architecture.svg"
OURS, VERL, DATA = "#dbe7fb", "#f3e3d3", "#e4efe2"  # colours of our parts, verl's and files
LINE = 'fill="none" stroke="#555" stroke-width="1.5" marker-end="url(#end)"'
TEXT = 'text-anchor="middle" fill="#444"'

# name: (x, y, width, height, title, line below it, colour)
BOXES = {
    "problems": (20, 40, 150, 56, "problems", "data/prepare_*.py", DATA),
    "loop": (230, 40, 190, 56, "agent loop", "verl_ext/rollout, protocols", OURS),
    "server": (490, 40, 190, 56, "rollout servers (vLLM)", "verl_ext/fleet", VERL),
    "tools": (230, 150, 190, 56, "tools", "verl_ext/environments", OURS),
    "sandbox": (490, 150, 190, 56, "sandbox", "verl_ext/sandbox", OURS),
    "reward": (230, 260, 190, 56, "verifier and reward", "verl_ext/reward", OURS),
    "sampler": (230, 370, 190, 56, "sampler", "verl_ext/trainer", OURS),
    "update": (490, 370, 190, 56, "loss and update (FSDP)", "verl, verl_ext/objectives", VERL),
    "records": (20, 260, 150, 56, "records, ledger", "verl_ext/records, ledger", DATA),
    "pages": (20, 370, 150, 56, "report, viewer", "verl_ext/report, view", OURS),
}
# (from, side, to, side, text, where the text stands relative to the middle)
ARROWS = [
    ("problems", "right", "loop", "left", "prompt", (0, -6)),
    ("loop", "right", "server", "left", "tokens", (0, -6)),
    ("loop", "bottom", "tools", "top", "call, reply", (34, 4)),
    ("tools", "right", "sandbox", "left", "program", (0, -6)),
    ("reward", "bottom", "sampler", "top", "+1, -1 or left out", (52, 4)),
    ("sampler", "right", "update", "left", "batch", (0, -6)),
    ("reward", "left", "records", "right", "", (0, 0)),
    ("records", "bottom", "pages", "top", "", (0, 0)),
]


def point(name: str, side: str) -> tuple[float, float]:
    x, y, width, height, *_ = BOXES[name]
    return {
        "left": (x, y + height / 2),
        "right": (x + width, y + height / 2),
        "top": (x + width / 2, y),
        "bottom": (x + width / 2, y + height),
    }[side]


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 450" font-family="sans-serif" font-size="12">',
        "<title>The path of a response</title>",
        '<defs><marker id="end" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path d="M0,0 L9,4 L0,8 z" fill="#555"/></marker></defs>',
        '<rect width="780" height="450" fill="#ffffff"/>',
    ]
    for start, out, end, into, text, (dx, dy) in ARROWS:
        (x1, y1), (x2, y2) = point(start, out), point(end, into)
        parts.append(f'<path d="M{x1},{y1} L{x2},{y2}" {LINE}/>')
        if text:
            x, y = (x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy
            parts.append(f'<text x="{x}" y="{y}" {TEXT}>{escape(text)}</text>')
    for path, x, y, text in (
        ("M680,398 H740 V68 H680", 734, 235, "weights"),
        ("M230,84 H200 V274 H230", 194, 180, "response"),
    ):
        parts.append(f'<path d="{path}" {LINE}/>')
        parts.append(f'<text x="{x}" y="{y}" {TEXT} transform="rotate(-90 {x} {y})">{text}</text>')
    for x, y, width, height, title, below, colour in BOXES.values():
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" stroke="#777"/>')
        parts.append(
            f'<text x="{x + width / 2}" y="{y + 23}" text-anchor="middle" font-weight="bold">{escape(title)}</text>'
        )
        parts.append(f'<text x="{x + width / 2}" y="{y + 42}" {TEXT}>{escape(below)}</text>')
    for place, (colour, text) in enumerate(
        ((OURS, "this project"), (VERL, "verl and vLLM, extended"), (DATA, "files"))
    ):
        parts.append(f'<rect x="{20 + 170 * place}" y="8" width="12" height="12" fill="{colour}" stroke="#777"/>')
        parts.append(f'<text x="{38 + 170 * place}" y="18" fill="#444">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    OUT.write_text(draw(), encoding="utf-8")
    print(f"wrote {OUT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
