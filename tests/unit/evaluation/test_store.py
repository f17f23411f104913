import json

import pytest

from tests.unit.evaluation.rows import row
from verl_ext.episode import EpisodeKey
from verl_ext.evaluation import store as evaluation
from verl_ext.evaluation.samples import read_samples
from verl_ext.evaluation.store import OtherSettings, Store, flatten
from verl_ext.runs.folder import files_of, path_of

SETTINGS = {"n": 4, "temperature": 1.0, "retool": {"protocol": "code", "sandbox": {"timeout_s": 5}}, "verifiers": None}


def test_samples_of_an_earlier_start_are_there_and_the_last_attempt_counts(tmp_path):
    store = Store(tmp_path, SETTINGS, {"server": "a"})
    store.add(row("p", 0, None, end_reason="aborted"))
    store.add(row("p", 1, 0))
    store.join()
    store = Store(tmp_path, SETTINGS, {"server": "another address"})  # what no sample depends on may change
    assert [key.session for key in store.rows] == [0, 1]
    store.add(row("p", 0, 1))
    store.join()
    assert store.rows[EpisodeKey("mine:p", 0)]["acc"] == 1.0
    assert [(sample.uid, sample.acc) for sample in read_samples(store.path)] == [
        ("mine:p_0_0", 1.0),
        ("mine:p_1_0", 0.0),
    ]
    assert json.loads((tmp_path / "settings.json").read_text()) == {"settings": SETTINGS, "server": "another address"}


def test_a_sample_that_has_ended_survives_a_kill(tmp_path):
    killed = Store(tmp_path, SETTINGS, {}, step=30)
    killed.add(row("p", 0, 1))
    killed.add(row("p", 1, 0))
    (tmp_path / "records" / "waiting" / "000002.parquet.999999999.tmp").write_bytes(b"half a sample")
    store = Store(tmp_path, SETTINGS, {}, step=30)
    assert {key.session: each["acc"] for key, each in store.rows.items()} == {0: 1.0, 1: 0.0}
    assert store.path == path_of(tmp_path, "trajectories", 30, validate=True)
    assert [sample.acc for sample in read_samples(store.path)] == [1.0, 0.0], "they are in the file that is read"
    assert not [*(tmp_path / "records" / "waiting").iterdir()]


def test_an_evaluation_continues_whichever_way_its_model_is_named(tmp_path):
    """By the merged folder, which has no step, or by the checkpoint."""
    for start, step in enumerate((0, 30)):
        store = Store(tmp_path, SETTINGS, {}, step)
        assert len(store.rows) == start
        store.add(row("p", start, 1))
        store.join()
    assert store.path == path_of(tmp_path, "trajectories", 0, validate=True) and len(files_of(tmp_path)) == 1
    assert {each["step"] for each in store.rows.values()} == {0}


def test_samples_are_put_into_the_file_before_the_end_and_none_is_lost_then(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "WAITING", 3)
    store = Store(tmp_path, SETTINGS, {})
    for number in range(8):
        store.add(row("p", number, 1))
        assert len(read_samples(store.path)) == 3 * ((number + 1) // 3) if number > 1 else not store.path.exists()
    assert len(Store(tmp_path, SETTINGS, {}).rows) == 8
    (file,) = files_of(tmp_path)
    assert file.validate and len(read_samples(file.path)) == 8


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (SETTINGS | {"temperature": 0.6}, "temperature: there 1.0, now 0.6\n"),
        (SETTINGS | {"retool": SETTINGS["retool"] | {"protocol": "hermes"}}, "protocol: there 'code', now 'hermes'\n"),
        (SETTINGS | {"top_p": 0.9}, "top_p: there None, now 0.9\n"),
        ({k: v for k, v in SETTINGS.items() if k != "n"}, "n: there 4, now None\n"),
    ],
)
@pytest.mark.parametrize("step", [0, 7])
def test_other_settings_are_refused_by_name(tmp_path, now, message, step):
    Store(tmp_path, SETTINGS, {}).add(row("p", 0, 1))
    with pytest.raises(OtherSettings, match="holds samples made with other settings") as error:
        Store(tmp_path, now, {}, step)
    assert message in str(error.value) and "--out" in str(error.value) and str(error.value).count("now") == 1
    assert json.loads((tmp_path / "settings.json").read_text())["settings"] == SETTINGS
    assert len(Store(tmp_path, SETTINGS, {}).rows) == 1


def test_an_evaluation_that_took_no_sample_starts_over_with_any_settings(tmp_path):
    Store(tmp_path, SETTINGS, {})
    assert not Store(tmp_path, SETTINGS | {"n": 8}, {}).rows


def test_records_of_which_nobody_knows_how_they_were_made_are_left_alone(tmp_path):
    (tmp_path / "records").mkdir()
    with pytest.raises(OtherSettings, match="has records/, but no settings.json"):
        Store(tmp_path, SETTINGS, {})


def test_flatten_keeps_lists_and_empty_sections():
    assert flatten({"a": {"b": [1, 2], "c": {}}, "d": None}) == {"a.b": [1, 2], "a.c": {}, "d": None}
