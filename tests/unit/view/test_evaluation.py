"""The folder of an evaluation in the viewer."""

from pathlib import Path

from tests.unit.evaluation.rows import evaluation, row, write
from verl_ext.evaluation.store import Store


def samples(number: int = 4) -> list[dict]:
    return [
        row(f"Is {i} prime", n, n > i, reward_parts='{"reward_base": 1.0}') for i in range(2) for n in range(number)
    ]


def open_pages(client, key: str = "val_000000", uid: str = "mine:Is 0 prime") -> str:
    """All pages of it, and none of them fails."""
    group = f"/run/0/{key}/group?uid={uid}&a=0&b=1"
    pages = [f"/run/0/{key}/{page}" for page in ("timeline", "timeline.json", f"sample?uid={uid}&session=1")]
    pages += [f"/run/0/{key}?failed=on&sort=low", "/", "/state.json", "/problems", "/run/0/export.eval", group]
    found = [client.get(page) for page in pages]
    assert [answer.status_code for answer in found] == [200] * len(pages)
    return found[-1].text


def test_an_evaluations_folder_opens(viewer, tmp_path: Path) -> None:
    failed = row("Is 0 prime", 4, 0, calls=0, errors=0, end_reason="aborted", turns=[], prompt=None)
    client = viewer(evaluation(tmp_path / "out", [*samples(), failed | {"exception": "no answer"}]))
    assert "An evaluation has samples and no curves." in client.get("/").text
    assert "9 of 9 rollouts, in 2 groups" in client.get("/run/0/val_000000").text
    assert "1 of 9 rollouts" in client.get("/run/0/val_000000?end=aborted").text
    assert "Is 0 prime" in open_pages(client)
    assert "reward_base 1.0" in client.get("/run/0/val_000000/sample?uid=mine:Is 0 prime&session=1").text


def test_it_is_compared_with_another(viewer, tmp_path: Path) -> None:
    folders = [evaluation(tmp_path / name, samples(number)) for name, number in (("a", 2), ("b", 4))]
    page = viewer(*folders).get("/problems?a=0:val_000000&b=1:val_000000").text
    assert "2 problems have judged samples on both sides" in page


def test_samples_that_are_added_are_shown(viewer, tmp_path: Path) -> None:
    store, (first, *others) = Store(tmp_path, {}, {}), samples(2)
    store.add(first)
    client, state = viewer(tmp_path), viewer(tmp_path).get("/state.json").text
    for count, each in enumerate(others, 2):
        store.add(each)
        store.join()
        assert client.get("/state.json").text != state
        state = client.get("/state.json").text
        assert f"{count} of {count} rollouts" in client.get("/run/0/val_000000").text


def test_a_light_validation_is_named_so(viewer, tmp_path: Path) -> None:
    write(tmp_path, samples(), step=5, light=True)
    write(tmp_path, samples(), step=5)
    client = viewer(tmp_path)
    assert "Light validation, step 5" in client.get("/run/0/light_000005").text
    assert "0 steps and 2 validations with records" in client.get("/").text
    open_pages(client, "light_000005")
