"""The token lens: values, colours, and the alarm on tokens that the model did not write."""

import json
import math
import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from verl_ext.records import store
from verl_ext.records.schema import ADDED_WITHIN
from verl_ext.view import tokens

SAMPLE = "/run/0/step_000002/sample"


def lens_of(page: str) -> list[dict]:
    data = json.loads(re.search(r'id="token-data">(.*?)</script>', page, re.S)[1])
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def test_the_lens_has_the_recorded_tokens_and_its_ratio_is_of_its_log_probs(
    client: TestClient, run_folder: Path
) -> None:
    table = store.read(store.path_of(run_folder, "tokens", 2)).to_pylist()
    recorded = [row for row in table if (row["uid"], row["session"]) == ("s2-p1", 1)]
    page = client.get(SAMPLE, params={"uid": "s2-p1", "session": 1}).text
    lens = lens_of(page)
    assert lens == [{name: row[name] for name in tokens.COLUMNS} for row in recorded] and len(lens) > 20
    for token in (token for token in lens if token["ratio"] is not None):
        assert math.isclose(token["ratio"], math.exp(token["log_prob"] - token["old_log_prob"]), rel_tol=1e-5)
        clipped = {"clipped_high": token["ratio"] > 1.28, "clipped_low": token["ratio"] < 0.8}
        assert clipped.get(token["decision"], True)
    assert page.count("</span>", page.index('id="lens"'), page.index('id="token-data"')) == len(lens)
    assert "banner" not in page


def test_a_part_of_a_character_has_a_place_to_click(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "tokens", 2)
    rows = [row | {"text": "√" if row["position"] % 2 else ""} for row in store.read(path).to_pylist()]
    store.write(path, "tokens", rows)
    page = client.get(SAMPLE, params={"uid": "s2-p1", "session": 1}).text
    shown = re.findall(r">([^<]*)</span>", page[page.index('id="lens"') : page.index('id="token-data"')])
    assert shown[:4] == ["◦", "√", "◦", "√"]


def test_a_token_whose_text_is_not_known_is_shown_by_its_id(client: TestClient, run_folder: Path) -> None:
    """A recorder whose process was restarted no longer has the texts that the trainer sent before."""
    path = store.path_of(run_folder, "tokens", 2)
    rows = [row | {"text": None} for row in store.read(path).to_pylist() if row["uid"] == "s2-p1"]
    store.write(path, "tokens", rows)
    page = client.get(SAMPLE, params={"uid": "s2-p1", "session": 1}).text
    shown = re.findall(r">([^<]*)</span>", page[page.index('id="lens"') : page.index('id="token-data"')])
    assert shown == [f"⟨{row['id']}⟩" for row in rows if row["session"] == 1]


def test_a_token_of_the_tool_that_trains_raises_the_red_banner(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "tokens", 2)
    rows = store.read(path).to_pylist()
    victim = next(row for row in rows if row["turn"] == 1 and row["uid"] == "s2-p1")
    victim["mask"] = True
    store.write(path, "tokens", rows)
    page = client.get(SAMPLE, params={"uid": "s2-p1", "session": victim["session"]}).text
    assert f"1 token was trained that the model did not write (mask 1), at {victim['position']}.</p>" in page


def test_a_token_that_trains_is_seen_by_either_sign() -> None:
    turns = [{"role": "model", "start": 0, "tokens": 2}, {"role": "tool", "start": 2, "tokens": 1}]
    rows = [{"position": position, "mask": True, "turn": turn} for position, turn in ((0, 0), (1, 1), (2, 0))]
    assert tokens.foreign(rows, turns) == [1, 2]
    assert tokens.foreign([row | {"mask": False} for row in rows], turns) == []


def test_colours_of_numbers_stand_around_their_neutral_value() -> None:
    # farthest from 1 is 1.7: from 0.3 to 1.7 in steps of 0.2; 0.3 the first, 1.0 in 0.9 to 1.1, 1.7 the last.
    classes, legend = tokens.colours("ratio", [{"ratio": value} for value in (0.31, 1.0, 1.7, None)])
    assert classes == ["b0", "b3", "b6", ""] and legend[3] == ("b3", "0.9 to 1.1")
    classes, legend = tokens.colours("decision", [{"decision": value} for value in ("kept", "masked", "kept")])
    assert classes == ["k0", "k1", "k0"] and legend == [("k0", "kept"), ("k1", "masked")]
    assert tokens.colours("advantage", [{"advantage": None}]) == ([""], [])


@pytest.mark.parametrize(("turns", "last"), [(8, "7"), (9, "others")])
def test_more_categories_than_colours_share_the_last_one(turns: int, last: str) -> None:
    classes, legend = tokens.colours("turn", [{"turn": turn} for turn in range(turns)])
    assert classes == ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "k7"][:turns]
    assert legend == [*((f"k{turn}", str(turn)) for turn in range(7)), ("k7", last)]


def test_a_page_asks_of_each_of_many_tokens_at_once_whether_it_is_foreign() -> None:
    rows = [{"position": place, "mask": True, "turn": 9} for place in range(20_000)]
    found = tokens.lens(rows, [{"role": "tool", "start": 0, "tokens": 20_000}])["foreign"]
    began = time.process_time()
    assert all(row["position"] in found for row in rows) and time.process_time() - began < 0.5


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_has_a_colour_of_its_own(value: float) -> None:
    classes, legend = tokens.colours("ratio", [{"ratio": value}, {"ratio": 1.0}, {"ratio": 1.5}])
    assert classes == ["inf", "b3", "b6"] and legend[-1] == ("inf", "not finite") and len(legend) == 8
    assert tokens.colours("log_prob", [{"log_prob": value}]) == (["inf"], [("inf", "not finite")])


def test_every_column_colours_a_page(client: TestClient) -> None:
    for name in tokens.COLOURED:
        answer = client.get(SAMPLE, params={"uid": "s2-p1", "session": 1, "colour": name})
        assert answer.status_code == 200 and f"<option selected>{name}</option>" in answer.text


def test_a_response_without_tokens_says_so(client: TestClient) -> None:
    page = client.get("/run/0/val_000004/sample", params={"uid": "v4-p1", "session": 0}).text
    assert "No tokens of this response were recorded" in page


def test_a_token_that_trains_after_the_last_turn_is_foreign() -> None:
    turns = [{"role": "model", "start": 0, "tokens": 2}]
    rows = [{"position": position, "mask": True, "turn": turn} for position, turn in ((1, 0), (2, 0), (0, 9))]
    assert tokens.foreign(rows, turns) == [2, 0]
    assert tokens.foreign(rows, []) == [], "no turn is known"


def branched(run_folder: Path) -> None:
    """Of one sample, make an agent's episode of two rows, the second of which continues from the model's first turn."""
    path = store.path_of(run_folder, "trajectories", 2)
    turn = {
        "role": "model",
        "end": "",
        "shown": None,
        "call": None,
        "server": None,
        "started_s": 1.0,
        "generate_s": 1.0,
    }
    turns = [
        turn | {"text": "first", "tokens": 2, "start": 0, "row": 0},
        turn | {"role": "user", "text": "go on", "tokens": 1, "start": 2, "row": 0},
        turn | {"text": "aside", "tokens": 2, "start": 0, "row": 1, "parent": 0},
        turn | {"text": "again", "tokens": 1, "start": 3, "row": 0, "parent": 0},
    ]
    agent = json.dumps({"requests": 4, "turns": 3, "repeats": 0, "forks": {"history": 1}})
    rows = [
        row
        | {
            "turns": turns,
            "calls": [],
            "agent": agent,
            "version_spans": [{"start": 0, "end": 2, "version": 1, "row": 1}],
        }
        if (row["uid"], row["session"]) == ("s2-p1", 1)
        else row
        for row in store.read(path).to_pylist()
    ]
    store.write(path, "trajectories", rows)
    path = store.path_of(run_folder, "tokens", 2)
    told = {"uid": "s2-p1", "session": 1, "step": 2, "id": 7}
    own = [
        told | {"row": number, "position": place, "text": f"{number}{place}", "mask": bool(mask), "turn": turn}
        for number, masks in enumerate(([(1, 0), (1, 0), (0, 1), (1, 2)], [(1, 0), (1, 0)]))
        for place, (mask, turn) in enumerate(masks)
    ]
    others = [row for row in store.read(path).to_pylist() if (row["uid"], row["session"]) != ("s2-p1", 1)]
    store.write(path, "tokens", [*others, *own])


def test_a_conversation_that_branches_is_shown_as_a_tree_with_the_tokens_of_one_row(
    client: TestClient, run_folder: Path
) -> None:
    branched(run_folder)
    asked = {"uid": "s2-p1", "session": 1}
    page = client.get(SAMPLE, params=asked).text
    assert [token["text"] for token in lens_of(page)] == ["10", "11"] and "banner" not in page
    assert "continues from turn 0" in page and "requests 4, turns 3; forks: 1 by history" in page
    assert "row 1, tokens 0 to 2: version 1" in page
    heads = re.findall(r"<h3[^>]*>(?:Row (\d)|Model, turn (\d)|User, turn (\d))", page)
    assert ["".join(each) for each in heads] == ["0", "0", "1", "3", "1", "2"]
    assert page.index('class="deep1"') > page.index("again")
    page = client.get(SAMPLE, params=asked | {"row": 0}).text
    assert [token["text"] for token in lens_of(page)] == ["00", "01", "02", "03"] and "banner" not in page


def test_a_token_that_the_model_did_not_write_is_told_of_every_row(client: TestClient, run_folder: Path) -> None:
    branched(run_folder)
    path = store.path_of(run_folder, "tokens", 2)
    rows = store.read(path).to_pylist()
    (bad,) = [row for row in rows if row["text"] == "02"]
    bad["mask"] = True
    store.write(path, "tokens", rows)
    page = client.get(SAMPLE, params={"uid": "s2-p1", "session": 1}).text
    assert "1 token was trained in row 0 that the model did not write" in page
    page = client.get(SAMPLE, params={"uid": "s2-p1", "session": 1, "row": 0}).text
    assert "1 token was trained that the model did not write (mask 1), at 2." in page


def test_records_of_a_run_before_rows_are_shown_as_ever(client: TestClient, run_folder: Path) -> None:
    for kind, added in (("trajectories", ["agent", "evidence"]), ("tokens", ["row"])):
        path = store.path_of(run_folder, kind, 2)
        table = store.read(path).drop_columns(added)
        if kind == "trajectories":
            without = {name: _older(table.schema.field(name), fields) for name, fields in ADDED_WITHIN.items()}
            types = [pa.field(each.name, without.get(each.name, each.type)) for each in table.schema]
            table = pa.Table.from_pylist(table.to_pylist(), schema=pa.schema(types, metadata=table.schema.metadata))
        pq.write_table(table, path)
    page = client.get(SAMPLE, params={"uid": "s2-p1", "session": 1})
    assert page.status_code == 200 and len(lens_of(page.text)) > 20 and "Row 0" not in page.text
    assert client.get("/run/0/all", params={"text": "boxed"}).status_code == 200  # with newer files of other steps


def _older(field: pa.Field, added: tuple[str, ...]) -> pa.DataType:
    return pa.list_(pa.struct([part for part in field.type.value_type if part.name not in added]))
