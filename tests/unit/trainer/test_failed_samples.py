"""Figures of a validation that leave out the samples that failed outside the model."""

import random

import pytest


def figures_of(samples, expected=None, **columns):
    """`judged_figures` of samples (source, uid, acc, reason), and what was found failed."""
    from verl_ext.trainer.failed_samples import find_failed, judged_figures

    sources, uids, accs, reasons = ([*values] for values in zip(*samples, strict=True))
    infos = {"reward": [2.0 * acc - 1 for acc in accs], "acc": accs, "finish_reason": reasons} | columns
    failed = find_failed(sources, uids, infos, expected)
    return judged_figures(sources, uids, infos, failed), failed


@pytest.mark.parametrize("seed", range(5))
def test_if_nothing_failed_the_figures_and_their_names_are_verls(seed, cpu_platform):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    rng = random.Random(seed)
    samples, preds, judged_by = [], [], []
    expected = {}
    for source, n in (("a", 1), ("b", 5), ("c", 8), ("d", 2)):
        for problem in range(3):
            uid = f"{source}{problem}"
            expected[source, uid] = n
            for _ in range(n):
                samples.append((source, uid, float(rng.random() < 0.5), "answer"))
                preds.append(rng.choice("xyz"))
                judged_by.append(rng.random() if source == "b" else None)  # a column of one data source only
    ours, failed = figures_of(samples, expected, pred=preds, judge=judged_by)
    sources, uids, accs, reasons = ([*values] for values in zip(*samples, strict=True))
    infos = {"reward": [2.0 * acc - 1 for acc in accs], "acc": accs, "finish_reason": reasons}
    infos |= {"pred": preds, "judge": judged_by}
    verls = PPOTrainer._val_metrics_update(None, sources, uids, infos, [], expected)
    assert ours == verls and len(ours) > 50
    assert failed.total.total() == 0


def test_a_fifth_that_the_sandbox_failed_leaves_a_perfect_model_perfect():
    """4 problems x 30, every fifth sample failed: 24 of 30 are left, and the names stay those of 30."""
    samples = [
        ("aime", f"p{problem}", *((0.0, "sandbox_failure") if i % 5 == 0 else (1.0, "answer")))
        for problem in range(4)
        for i in range(30)
    ]
    figures, failed = figures_of(samples, pred=["7"] * 120)
    core = {name: value for name, value in figures.items() if name.startswith("val-core/") and "std" not in name}
    names = ["mean@30", "best@30/mean", "maj@30/mean"]
    assert core == {f"val-core/aime/acc/{name}": 1.0 for name in names}
    assert not any("@24" in name for name in figures)
    assert failed.share("aime") == 0.2 and failed.total == {"sandbox_failure": 24}


def test_answers_that_are_equal_vote_together():
    """Of .5, \\frac12, 1/2 (right) and 7, 7, verl's own maj@5 takes 7 in most resamples."""
    preds = ["0.5", r"\frac12", "1/2", "7", "7"]
    samples = [("s", "a", float(i < 3), "answer") for i in range(5)]
    same, told = (figures_of(samples, pred=each)[0] for each in (["1/2"] * 3 + ["7"] * 2, preds))
    name = "val-core/s/acc/maj@5/mean"
    assert same[name] == told[name] > 0.5
    normal = figures_of(samples, pred=preds, normalised=["0.5", r"\frac{1}{2}", "1/2", "7", "7"])[0]
    assert normal[name] == same[name]
    nothing = figures_of(samples, pred=["", " ", "", "7", "7"])[0]  # no answer is a separate answer, as verl counts
    assert nothing[name] == same[name]


def test_each_problem_counts_once_however_many_of_its_samples_were_judged():
    """a: 1 1 0 of 4, b: 1 0 of 4. (2/3 + 1/2) / 2 = 7/12; the samples together would be 3/5."""
    samples = [("s", "a", 1.0, "answer"), ("s", "a", 1.0, "answer"), ("s", "a", 0.0, "answer")]
    samples += [("s", "a", 0.0, "aborted"), ("s", "b", 1.0, "answer"), ("s", "b", 0.0, "answer")]
    samples += [("s", "b", 0.0, "sandbox_failure")]
    figures, failed = figures_of(samples, {("s", "a"): 4, ("s", "b"): 4, ("s", "gone"): 4})
    assert figures["val-core/s/acc/mean@4"] == pytest.approx(7 / 12)
    assert figures["val-aux/s/acc_success_only/mean@4"] == figures["val-core/s/acc/mean@4"]
    # 1 aborted, 1 failed by the sandbox, and 1 of b and 4 of "gone" that stored nothing, of 12
    assert failed.total == {"aborted": 1, "sandbox_failure": 1, "raised": 5}
    assert failed.share("s") == pytest.approx(7 / 12)
    metrics = failed.metrics(is_void=True)
    assert metrics["val-aux/failed/raised"] == pytest.approx(5 / 12) and metrics["val-aux/failed/void"] == 1.0


def test_the_worst_source_decides():
    samples = [("a", "p", 1.0, "answer")] * 9 + [("a", "p", 0.0, "aborted")] + [("b", "q", 0.0, "aborted")]
    _, failed = figures_of(samples)
    assert failed.worst == "b" and failed.share("b") == 1.0 and failed.share("a") == 0.1
