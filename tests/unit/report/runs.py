"""Folders of runs to report, and the checks made of each page."""

import json
from html.parser import HTMLParser

from tests.unit.evaluation import rows as records
from verl_ext.report.page import write_report

HOSTILE = "</pre><script>alert('x')</script>&amp;"
VOID = {"meta", "br", "link", "img", "input", "path", "circle"}


def row(problem, acc, *, source="tiny_tools", calls=1, errors=0, failed=0, turns=None, **columns):
    """Return a row of records: programs that print 7, and an answer."""
    own = [("model", f"<code>print({problem!r})</code>"), ("tool", "\n<interpreter>\n7\n</interpreter>\n")] * calls
    own = turns or [*own, ("model", f"\\boxed{{{7 if acc else 5}}}")]
    columns |= {"end_reason": "sandbox_failure"} if failed else {}
    return records.row(
        problem, 0, acc, calls=calls, errors=errors, domain=source, uid=f"uuid{problem}", problem=None,
        turns=[{"role": role, "text": text} for role, text in own], **columns,
    )  # fmt: skip


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


def add_evaluation(folder, right_before=range(2), right_after=range(7)):
    """8 problems of the trained kind and 2 others; one sample each."""
    before = [row(f"p{i}", i in right_before, calls=i % 2) for i in range(8)]
    before += [row(f"o{i}", 0, source="tiny_tools_ood_large", calls=0) for i in range(2)]
    after = [row(f"p{i}", i in right_after, errors=i == 0) for i in range(8)]
    after += [row("o0", 1, source="tiny_tools_ood_large"), row("o1", 0, source="tiny_tools_ood_large", failed=1)]
    records.write(folder / "eval" / "before", before)
    records.write(folder / "eval" / "after", after)


def add_training(folder):
    sft = [{"step": step, "data": {"train/loss": 4.0 / step}} for step in range(1, 21)]
    write_lines(folder / "sft" / "metrics-1.jsonl", [*sft, {"step": 20, "data": {"val/loss": 0.25}}])
    rl = []
    for step in range(1, 6):
        timings = {"timing_s/gen": 1.0, "timing_s/update_actor": 0.5, "timing_s/step": 2.0 + 8 * (step <= 2)}
        rl.append({"step": step, "data": {"train/acc": step / 10, "critic/score/mean": None} | timings})
    rl[4]["data"]["val-core/tiny_tools/acc/mean@2"] = 0.875
    write_lines(folder / "rl" / "metrics-1.jsonl", rl)
    for stage in ("sft", "rl"):
        (folder / stage / "hydra").mkdir()
    (folder / "sft" / "hydra" / "config.yaml").write_text("optim: {lr: 0.004}\n")
    (folder / "rl" / "hydra" / "config.yaml").write_text(f'data: {{train_batch_size: 16}}\nnote: "{HOSTILE}"\n')
    stages = [("sft", 300.0, "done", 4.2), ("rl", 65.4, "broken", 9.5)]
    (folder / "stages.json").write_text(
        json.dumps([{"stage": s, "started": 0, "wall_s": w, "status": st, "peak_gb": gb} for s, w, st, gb in stages])
    )


def written(folder):
    """Return (console text, page, summary) of the report of a folder."""
    text = write_report(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return text, (folder / "report.html").read_text(encoding="utf-8"), summary


class Balance(HTMLParser):
    """Raises if an end tag does not close the element that is open."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside <{'<'.join(self.open[-3:])}> at {self.getpos()}"
        self.open.pop()
