"""Check that a run's records and the viewer's page of a response agree with ledger, batches, and themselves.

`run` is a `Run` of test_failures.py.
"""

import asyncio
import json
import math
import re
import warnings
from collections import defaultdict
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.view import chromium
from tests.unit.view.served import served
from verl_ext.episode import EpisodeKey
from verl_ext.ledger.prompts import read_tally
from verl_ext.records import store
from verl_ext.view import data as view
from verl_ext.view import timeline
from verl_ext.view.app import create_app


def check_records(run: Any) -> None:
    """Check that the records agree with the ledger, with the batches that were trained on, and with themselves."""
    rows = {EpisodeKey(row["uid"], row["session"]): row for row in run.trajectories()}
    ends = read_tally(run.out).ends
    assert {row["uid"]: row["outcome"] for row in rows.values()} == {uid: str(end) for uid, end in ends.items()}
    taken = set()
    for step, batch in enumerate(run.batches(), 1):
        for key, advantage in zip(batch["keys"], batch["advantages"], strict=True):
            row = rows[EpisodeKey.parse(key).original]
            taken.add(EpisodeKey.parse(key).original)
            assert row["trained_step"] == step and row["advantage"] == pytest.approx(advantage, abs=1e-4)
    assert taken == {key for key, row in rows.items() if row["trained_step"] is not None}
    responses = defaultdict(list)
    for token in store.rows(run.out, "tokens"):
        responses[EpisodeKey(token["uid"], token["session"])].append(token)
    assert {rows[key]["trained_step"] for key in responses} == {1, 2}
    for key, tokens in responses.items():
        row = rows[key]
        assert [token["position"] for token in tokens] == list(range(row["response_tokens"]))
        assert sum(token["mask"] for token in tokens) == row["model_tokens"]
        for token in tokens:
            assert token["mask"] == (row["turns"][token["turn"]]["role"] == "model")
            assert token["version"] == (row["trained_step"] - 1 if token["mask"] else None)  # the mode is sync
            if token["mask"]:
                assert token["old_log_prob"] == token["rollout_log_prob"] and token["advantage"] == row["advantage"]
                ratio = math.exp(token["log_prob"] - token["old_log_prob"])
                assert token["ratio"] == pytest.approx(ratio, rel=1e-4)
                bounds = ratio < 0.8 and token["advantage"] < 0, ratio > 1.28 and token["advantage"] > 0
                assert token["decision"] == {(True, False): "clipped_low", (False, True): "clipped_high"}.get(
                    bounds, "kept"
                )
    check_tokens(run, rows, responses)
    viewed = view.Run(run.out, "rl", 0)
    times = [row for key in viewed.files() for row in timeline.intervals(viewed, key)]
    assert {("trainer", "wait"), ("trainer", "update"), ("tool", "tool")} <= {(t["lane"], t["what"]) for t in times}
    written = [t for t in times if t["what"] == "generate"]
    assert written and all(t["start_s"] < t["end_s"] and t["lane"] not in ("trainer", "tool") for t in written)


def check_tokens(run: Any, rows: dict[EpisodeKey, dict], responses: dict[EpisodeKey, list[dict]]) -> None:
    """Check that ids, log-probs and advantages in the records, and on the viewer's page of a response, are those of the
    batch that the sampler gave to the trainer."""
    seen: dict[EpisodeKey, list[list]] = {}
    for line in (run.out / "tokens.jsonl").read_text().splitlines():
        seen |= {EpisodeKey.parse(key).original: values for key, values in json.loads(line).items()}
    for key, tokens in responses.items():
        ids, log_probs = seen[key]
        assert [token["id"] for token in tokens] == ids
        assert [t["rollout_log_prob"] for t in tokens if t["mask"]] == [
            log_prob for t, log_prob in zip(tokens, log_probs, strict=True) if t["mask"]
        ]
    advantages = {
        EpisodeKey.parse(key).original: advantage
        for batch in run.batches()
        for key, advantage in zip(batch["keys"], batch["advantages"], strict=True)
    }
    key = max(responses, key=lambda key: (len(rows[key]["calls"]), key))  # a response with tool tokens, if any
    row, (ids, log_probs) = rows[key], seen[key]
    client = TestClient(create_app([view.Run(run.out, "rl", 0)], 8400), base_url="http://127.0.0.1:8400")
    address = f"/run/0/step_{row['trained_step']:06d}/sample"
    page = client.get(address, params={"uid": row["uid"], "session": row["session"]}).text
    data = json.loads(re.search(r'id="token-data">(.*?)</script>', page, re.S)[1])
    shown = [dict(zip(data["columns"], values, strict=True)) for values in data["rows"]]
    assert [token["id"] for token in shown] == ids
    trained = [(token, log_prob) for token, log_prob in zip(shown, log_probs, strict=True) if token["mask"]]
    assert len(trained) == row["model_tokens"] and "banner" not in page
    for token, log_prob in trained:
        assert token["rollout_log_prob"] == token["old_log_prob"] == log_prob
        assert token["advantage"] == pytest.approx(advantages[key], abs=1e-4)
    last = max(place for place, token in enumerate(shown) if token["mask"])
    asyncio.run(check_click_path(run, row, last, ids[last], log_probs[last], advantages[key]))


async def check_click_path(
    run: Any, row: dict[str, Any], position: int, token: int, log_prob: float, advantage: float
) -> None:
    """Click in a browser from the curve to a token of a response, whose values must be the batch's."""
    if chromium.PROGRAM is None:
        warnings.warn("No Chromium here, apt-get install chromium: no click leads to a token.", stacklevel=2)
        return
    step = f"/run/0/step_{row['trained_step']:06d}"
    here = f"location.pathname == '{step}%s' && document.readyState == 'complete'"
    link = "[...document.querySelectorAll('a')].find((a) => a.getAttribute('href').startsWith('%s')).click()"
    with served(run.out) as address:
        async with chromium.browser(run.out / "profile") as tab:
            await tab.open(address)
            await tab.click_on_curve(row["trained_step"])
            await tab.until(here % "")
            await tab.follow(link % f"{step}/group?uid={row['uid']}")
            await tab.until(here % "/group")
            await tab.follow(link % f"{step}/sample?uid={row['uid']}&session={row['session']}")
            await tab.until(here % "/sample")
            told = await tab.token(position)
            assert int(told["id"]) == token and not tab.errors
            assert float(told["rollout_log_prob"]) == float(told["old_log_prob"]) == log_prob
            assert float(told["advantage"]) == pytest.approx(advantage, abs=1e-4)
            ratio = math.exp(float(told["log_prob"]) - log_prob)
            assert float(told["ratio"]) == pytest.approx(ratio, rel=1e-4)
