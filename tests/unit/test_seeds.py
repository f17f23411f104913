"""`scripts/seeds.py` prints the table that docs/results.md shows."""

import importlib.util
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_the_page_shows_the_table_as_the_script_prints_it():
    spec = importlib.util.spec_from_file_location("seeds", REPO / "scripts" / "seeds.py")
    seeds = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seeds)

    def side(inside: tuple, outside: tuple) -> dict:
        figures = {"tiny_tools": inside, "tiny_tools_ood_large": outside, "tiny_tools_ood_chain": outside}
        return {
            source: {"metrics": {"acc/mean@k": dict(zip(("value", "low", "high"), figure, strict=True))}}
            for source, figure in figures.items()
        }

    nothing = (0.0, 0.0, 0.056)
    summary = {"evaluation": {"before": side((0.321, 0.283, 0.367), nothing)}}
    summary["evaluation"]["after"] = side((0.966, 0.951, 0.981), nothing)
    page = (REPO / "docs" / "results.md").read_text()
    assert f"\n{seeds.table('tiny', {'seed 0': summary})}\n" in page
    assert seeds.accuracy({"evaluation": {"after": side((1.0, 0.986, 1.0), nothing)}}, "after", "tiny_tools") == (
        "1.00 [.99, 1.00]"
    )
