import json

import pytest

from verl_ext.evaluation.store import OtherSettings, Store, flatten

SETTINGS = {"n": 4, "temperature": 1.0, "retool": {"protocol": "code", "sandbox": {"timeout_s": 5}}, "verifiers": None}


def test_rows_of_an_earlier_start_are_there_and_the_last_of_a_uid_counts(tmp_path):
    store = Store(tmp_path, SETTINGS, {"server": "a"})
    store.add({"uid": "p_0_0", "failure": "server_failure"})
    store.add({"uid": "p_1_0", "failure": None})
    store.close()
    store = Store(tmp_path, SETTINGS, {"server": "another address"})  # what no sample depends on may change
    store.add({"uid": "p_0_0", "failure": None})
    assert store.rows() == {"p_0_0": {"uid": "p_0_0", "failure": None}, "p_1_0": {"uid": "p_1_0", "failure": None}}
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 3
    store.close()
    assert json.loads((tmp_path / "settings.json").read_text()) == {"settings": SETTINGS, "server": "another address"}


def test_a_sample_is_on_disk_when_it_has_ended(tmp_path):
    store = Store(tmp_path, SETTINGS, {})
    store.add({"uid": "p_0_0", "output": "π"})
    assert json.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8")) == {"uid": "p_0_0", "output": "π"}
    store.close()


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (SETTINGS | {"temperature": 0.6}, "temperature: there 1.0, now 0.6\n"),
        (SETTINGS | {"retool": SETTINGS["retool"] | {"protocol": "hermes"}}, "protocol: there 'code', now 'hermes'\n"),
        (SETTINGS | {"top_p": 0.9}, "top_p: there None, now 0.9\n"),
        ({k: v for k, v in SETTINGS.items() if k != "n"}, "n: there 4, now None\n"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, now, message):
    store = Store(tmp_path, SETTINGS, {})
    store.add({"uid": "p_0_0"})
    store.close()
    with pytest.raises(OtherSettings, match="holds samples made with other settings") as error:
        Store(tmp_path, now, {})
    assert message in str(error.value) and "--out" in str(error.value) and str(error.value).count("now") == 1
    assert json.loads((tmp_path / "settings.json").read_text())["settings"] == SETTINGS


def test_samples_of_unknown_settings_are_refused(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"uid": "p_0_0"}\n')
    with pytest.raises(OtherSettings, match="no settings.json"):
        Store(tmp_path, SETTINGS, {})


def test_a_line_that_a_killed_process_left_half_written_is_dropped(tmp_path):
    store = Store(tmp_path, SETTINGS, {})
    store.add({"uid": "p_0_0"})
    store.close()
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"uid": "p_1_0", "out')
    store = Store(tmp_path, SETTINGS, {})
    store.add({"uid": "p_2_0"})
    assert list(store.rows()) == ["p_0_0", "p_2_0"]
    store.close()


def test_flatten_keeps_lists_and_empty_dicts():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}
