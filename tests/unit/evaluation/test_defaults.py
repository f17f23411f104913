"""Which settings an evaluation uses if it names no --config."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from verl_ext.evaluation.__main__ import main, parse_args
from verl_ext.evaluation.defaults import BASE, choose, for_this_machine
from verl_ext.evaluation.settings import ConfigError, load_config
from verl_ext.evaluation.take import chosen_settings

QWEN = Path(__file__).parents[2] / "data" / "qwen2.5_chat_template.jinja"
PROTOCOL = "retool.protocol="
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size="


def model(folder: Path, *, template: str = "", **config: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"max_position_embeddings": 32768, "num_attention_heads": 8} | config)
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many GPUs torch finds here, and whether it could drive one."""
    import torch

    def have(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setenv("VERL_PLATFORM", "cuda" if number else "cpu")

    have(0)
    return have


@pytest.mark.parametrize("name", ["merged_step_400", "merged"])
def test_a_model_in_a_runs_folder_is_evaluated_with_the_runs_settings(tmp_path, name):
    folder, saved = model(tmp_path / name, template="<tool_call>"), tmp_path / "hydra" / "config.yaml"
    saved.parent.mkdir()
    saved.write_text("actor_rollout_ref: {}\n")
    assert choose(folder, [], in_process=True)[:2] == (str(saved), [])
    saved.write_text("data: {retool: {protocol: hermes}}\ntrainer: {experiment_name: tiny_sft}\n")
    assert choose(folder, [], in_process=True)[:2] == ("tiny_dapo", [f"{PROTOCOL}hermes"])
    (tmp_path / "link").symlink_to(folder)  # lies in the run all the same
    assert str(tmp_path) in choose(tmp_path / "link", [], in_process=True).why


@pytest.mark.parametrize(
    ("template", "protocol"),
    [
        (QWEN.read_text(), "hermes"),
        ([{"name": "default", "template": "x"}, {"name": "tool_use", "template": "<tool_call>"}], "hermes"),
        ("{{ messages }} write <code>...</code>", "code"),
    ],
)
def test_the_chat_template_says_the_protocol(tmp_path, gpus, template, protocol):
    chosen = choose(model(tmp_path / "m", template=template), [], in_process=True)
    assert chosen.config == BASE and chosen.overrides == [f"{SIZE}1", f"{PROTOCOL}{protocol}"]
    assert f"protocol {protocol} as in the chat template" in chosen.why


def test_the_chat_template_may_have_a_file_of_its_own(tmp_path, gpus):
    for name, content in (("chat_template.jinja", "<tool_call>"), ("chat_template.json", '{"a": "<tool_call>"}')):
        folder = model(tmp_path / name)
        (folder / name).write_text(content)
        assert f"{PROTOCOL}hermes" in choose(folder, [], in_process=True).overrides


@pytest.mark.parametrize("broken", [None, "", "[]", "{"])
def test_a_protocol_that_nobody_says_is_asked_for_and_one_that_is_given_counts(tmp_path, gpus, broken):
    folder = model(tmp_path / "m", template="{{ messages }}")
    if broken is not None:
        (folder / "tokenizer_config.json").write_text(broken)
    for where, named in ((folder, str(folder)), (None, "the model's folder is not here")):
        with pytest.raises(ConfigError, match="Give --protocol code .*or --protocol hermes.*or --config") as error:
            choose(where, ["retool.traceback=full"], in_process=False)
        assert named in str(error.value)
        for given in (f"{PROTOCOL}code", f"++{PROTOCOL}code"):
            assert choose(where, [given], in_process=False).overrides == []


@pytest.mark.parametrize(
    ("devices", "heads", "expected"), [(0, 8, 1), (1, 8, 1), (2, 8, 2), (3, 8, 2), (8, 40, 8), (8, 14, 2), (4, 9, 1)]
)
def test_a_model_is_spread_over_the_gpus_that_are_here(tmp_path, gpus, devices, heads, expected):
    gpus(devices)
    folder = model(tmp_path / "m", num_attention_heads=heads)
    assert choose(folder, [f"{PROTOCOL}code"], in_process=True).overrides == [f"{SIZE}{expected}"]


@pytest.mark.parametrize(("positions", "prompt", "response"), [(8192, 2048, 6144), (2048, 1024, 1024)])
def test_lengths_fit_the_model(tmp_path, gpus, positions, prompt, response):
    chosen = choose(model(tmp_path / "m", max_position_embeddings=positions), [f"{PROTOCOL}code"], in_process=False)
    data = load_config(chosen.config, chosen.overrides).data
    assert (data.max_prompt_length, data.max_response_length) == (prompt, response)


def test_a_machine_without_gpus_gets_the_settings_of_one(gpus):
    config, overrides = for_this_machine(BASE, [f"{SIZE}1"])
    assert config.trainer.device == "cpu" and overrides == ["+hardware=cpu", f"{SIZE}1"]
    given = ["+hardware=cpu_small"]
    assert for_this_machine(BASE, given)[1] == given
    gpus(4)
    config, overrides = for_this_machine(BASE, [])
    assert config.trainer.device == "cuda" and overrides == []


@pytest.fixture
def server() -> Iterator[dict]:
    """Serve a list of models whose `root` is in the dictionary; yield the dictionary, with the `url`."""
    said = {"root": None}

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "m", "root": said["root"]}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield said | {"url": f"http://127.0.0.1:{http.server_port}/v1", "said": said}
        http.shutdown()


def test_a_server_names_the_folder_whose_run_has_the_settings(tmp_path, server, capsys, monkeypatch):
    monkeypatch.setattr("verl_ext.evaluation.take.set_environment", lambda: None)  # its variables would leak
    folder, saved = model(tmp_path / "run" / "merged"), tmp_path / "run" / "hydra" / "config.yaml"
    saved.parent.mkdir()
    saved.write_text("data: {retool: {protocol: hermes}}\ntrainer: {experiment_name: tiny_sft}\n")
    server["said"]["root"] = str(folder)
    argv = ["--server", server["url"], "--out", str(tmp_path / "o")]
    config, chosen = chosen_settings(parse_args([*argv, "--n", "3"]), None)
    assert (config.retool.protocol, chosen.config) == ("hermes", "tiny_dapo")
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 3
    assert f"Settings of the model's run, {tmp_path / 'run'}" in capsys.readouterr().out
    server["said"]["root"] = "Qwen/Qwen3-4B"  # on another machine, or from the hub
    with pytest.raises(
        SystemExit, match="evaluate: The protocol .* the model's folder is not here. Give --protocol code"
    ):
        main(argv)
    assert chosen_settings(parse_args([*argv, "--protocol", "code"]), None)[0].retool.protocol == "code"
