"""The benchmarks of RL and of its records: a second start keeps the figures of the first, and has its own."""

import contextlib
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.studies.shared import whole_cpu
from verl_ext.records import store
from verl_ext.records.schema import CPU_KEY
from verl_ext.settings import compose_run


class Launched:
    """Stands in for the Supervisor: writes what the launcher and TRL's side leave behind after a run of four steps."""

    started: list[Path] = []  # folders
    commands: list[list[str]] = []
    environments: list[dict[str, str]] = []
    sizes: list[dict] = []  # that TRL's side received

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, command, *, log, env):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started.append(log.parent)
        self.commands.append(command)
        self.environments.append(env)
        if "OUTPUT_DIR" not in env:
            self.sizes.append(json.loads(command[command.index("--sizes") + 1]))
            counts = {"calls_per_response": [1.0] * 4, "tokens_per_response": [30.0] * 4}
            figures = Path(command[command.index("--out") + 1])
            figures.write_text(json.dumps({"step_ends": [10, 12, 14, 16], "reward": [0.0], **counts}))
            return
        data = {"timing_s/step": 2.0, "timing_s/update_actor": 0.5}
        data |= {"filter_groups/generated": 16, "train/acc": 0.5, "tool/calls": 1.0, "train/model_tokens": 30.0}
        rows = [json.dumps({"step": step, "data": data}) for step in (1, 2, 3, 4)]
        # The launcher names the file after the time it starts.
        (Path(env["OUTPUT_DIR"]) / f"metrics-{len(self.started)}.jsonl").write_text("\n".join(rows) + "\n")


def prepare(script, tmp_path, monkeypatch, options):
    (tmp_path / "run" / "sft" / "merged").mkdir(parents=True)
    monkeypatch.setattr(script, "Supervisor", Launched)
    monkeypatch.setattr(script, "running_server", lambda options: contextlib.nullcontext("http://127.0.0.1:1"))
    seconds = itertools.count()
    monkeypatch.setattr("time.strftime", lambda form: f"20260101-00000{next(seconds)}")
    monkeypatch.setattr(sys, "argv", ["bench", "--run", f"{tmp_path}/run", "--out", f"{tmp_path}/out", *options])
    for name in ("started", "commands", "environments", "sizes"):
        monkeypatch.setattr(Launched, name, [])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speedups", ["--rounds", "1"]),
        ("vs_trl", ["--trl-python", "python", "--rounds", "1", "--latencies", "0"]),
    ],
)
def test_a_second_start_keeps_the_figures_of_the_first(name, options, tmp_path, monkeypatch):
    script = importlib.import_module(f"scripts.bench.{name}")
    prepare(script, tmp_path, monkeypatch, options)
    script.main()
    first = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    script.main()
    assert {path: path.read_bytes() for path in first} == first
    assert len(set(Launched.started)) == len(Launched.started) > 2
    assert len([*(tmp_path / "out").glob("*/summary.json")]) == 2


def test_trl_has_the_batch_of_the_small_run(tmp_path, monkeypatch, capsys):
    from scripts.bench import vs_trl as script

    prepare(script, tmp_path, monkeypatch, ["--trl-python", "python", "--model", "small"])
    script.main()
    ours, _trl, static = Launched.commands
    assert ours[1].endswith("run_smollm2_dapo.sh") and static[1] == ours[1]
    assert [command[-1] == "algorithm.filter_groups.enable=false" for command in (ours, static)] == [False, True]
    (sizes,) = Launched.sizes
    # 8 prompts x 8 samples, one update of micro-batches of two groups
    assert [sizes[key] for key in ("samples", "responses", "mini_batch", "micro_batch")] == [8, 64, 64, 16]
    assert (sizes["response_tokens"], sizes["lr"], sizes["warmup_steps"]) == (192, 4e-5, 0)
    # 16 prompts x 8 in 2 s of ours; 64 responses in 2 s of TRL's
    assert "a step of verl-retool takes 1.00 x TRL's, and it generates 2.00 x as many" in capsys.readouterr().out


def test_trl_has_the_batch_of_the_tiny_run():
    from scripts.bench import vs_trl as script

    sizes = script.sizes(script.compose_run(*script.MODELS["tiny"].config))
    # 16 prompts x 8 samples in two updates, each in one go
    assert [sizes[key] for key in ("responses", "mini_batch", "micro_batch")] == [128, 64, 64]


RECORD = {  # 3 tokens of the model, a tool's output, 2 tokens of the model
    "uid": "a",
    "acc": 1.0,
    "prompt": "Add.",
    "turns": [
        {"role": "model", "text": "abc", "tokens": 3},
        {"role": "tool", "text": "<7>", "tokens": 3},
        {"role": "model", "text": "de", "tokens": 2},
    ],
}


def read(script, **changes):
    return script.read_response(RECORD | changes, lambda text: [ord(char) for char in text])


def test_a_response_has_the_recorded_tokens_and_the_tools_between():
    from scripts.bench import raw_parts as script

    found = read(script)
    assert "".join(map(chr, found.ids)) == "abc<7>de"
    assert [found.ids[start : start + length] for start, length in found.turns] == [[97, 98, 99], [100, 101]]
    other = [{"role": "model", "text": "abc", "tokens": tokens} for tokens in (5, 2)]
    assert "".join(map(chr, read(script, turns=other).ids)) == "abcccab"


def test_generation_is_timed_without_the_extension_that_trainers_send_weights_through(monkeypatch):
    """The extension has its own sampler, and ends its process with the parent."""
    from scripts.bench.raw_parts import time_generation

    class MadeError(Exception):
        pass

    def make(model: str, **options: object) -> None:
        raise MadeError(options)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=make, SamplingParams=None))
    monkeypatch.setattr("verl_ext.cpu.patches.alias_vllm_distribution", lambda: None)
    rollout = compose_run("smollm2_dapo", ["+hardware=cpu_small"]).actor_rollout_ref.rollout
    assert rollout.engine_kwargs.vllm.worker_extension_cls
    with pytest.raises(MadeError) as made:
        time_generation("model", [], rollout)
    (options,) = made.value.args
    assert "worker_extension_cls" not in options and options["max_num_seqs"] == rollout.max_num_seqs


def test_groups_with_right_and_wrong_answers_are_trained_first():
    from scripts.bench import raw_parts as script

    equal = [read(script, uid="equal") for _ in range(2)]
    mixed = [read(script, uid="mixed", acc=right) for right in (0.0, 1.0)]
    assert script.trained_groups([*equal, *mixed], 1) == [mixed]
    assert script.trained_groups([*equal, *mixed], 8) == [mixed, equal]


def test_two_groups_in_one_row_have_loss_and_gradients_of_their_sequences(monkeypatch):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from scripts.bench import raw_parts as script

    monkeypatch.setattr(script, "CHUNK", 4)
    torch.manual_seed(0)
    config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=True, **config))
    group = [read(script), read(script, turns=[{"role": "model", "text": "wxyz", "tokens": 4}])]
    other = [read(script, uid="b", prompt="Take away."), read(script, uid="b", prompt="Take away.")]

    loss = script.forward_backward(model, script.as_row([group, other]))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    plain = 0.0
    for response in group + other:
        logits = model(torch.tensor([response.prompt + response.ids])).logits[0, len(response.prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1)[range(len(response.ids)), response.ids]
        plain -= sum(log_probs[start : start + length].sum() for start, length in response.turns)
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "3", "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}])
def test_what_has_the_whole_cpu_has_the_variables_of_the_launcher(tmp_path, monkeypatch, given):
    always = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "VLLM_CPU_KVCACHE_SPACE", "MALLOC_ARENA_MAX")
    names = (*always, "ONEDNN_DEFAULT_FPMATH_MODE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    python, repo = tmp_path / "python", Path(__file__).resolve().parents[3]
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    variables = {"RETOOL_HARDWARE": "cpu", "DOCTOR": "0", "PYTHON": str(python), "OUTPUT_DIR": f"{tmp_path}/out"}
    variables |= {"DATA_DIR": str(tmp_path), "MODEL_PATH": "owner/name"}
    launcher = ["bash", str(repo / "recipe/retool/run_smollm2_dapo.sh"), "--cfg", "job"]
    told = subprocess.run(launcher, env=os.environ | variables, capture_output=True, text=True, check=True).stdout
    launched = dict(line.split("=", 1) for line in told.splitlines() if line.startswith(names))
    found = whole_cpu()
    assert {name: found[name] for name in names if name in found} == launched and launched.items() >= given.items()
    assert launched.keys() >= set(always)


def test_both_sides_compute_in_fp32_and_trl_has_the_variables_of_the_launcher(tmp_path, monkeypatch):
    from scripts.bench import vs_trl as script

    prepare(script, tmp_path, monkeypatch, ["--trl-python", "python", "--model", "small", "--latencies", "0", "0.1"])
    script.main()
    ours, trl, _, *slowed = Launched.environments
    direct = "http://127.0.0.1:1"
    assert ours["SANDBOX_URL"] == direct and slowed[0]["SANDBOX_URL"] not in ("", direct)
    assert ours["ONEDNN_DEFAULT_FPMATH_MODE"] == trl["ONEDNN_DEFAULT_FPMATH_MODE"] == "STRICT"
    assert trl.items() >= (whole_cpu() | {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}).items()


@pytest.mark.parametrize(("mode", "precision"), [("BF16", "medium"), ("STRICT", "highest")])
def test_products_of_the_raw_update_are_rounded_where_those_of_the_run_are(tmp_path, monkeypatch, mode, precision):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from scripts.bench import raw_parts as script

    config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **config)).save_pretrained(tmp_path)
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", mode)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert script.time_update(str(tmp_path), [[read(script)]]) > 0
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_records_are_a_share_of_a_step_and_the_validation_after_it(tmp_path, monkeypatch):
    """.03 s of 2 cores x (1 s + 2 s of validation) are .5%; only the step would make it 1.5%, which is too much."""
    from scripts.bench import records as script

    monkeypatch.setattr(script.os, "cpu_count", lambda: 2)
    for validate, seconds in ((False, "0.02"), (True, "0.01")):
        path = store.path_of(tmp_path, "trajectories", 1, validate=validate)
        store.write(path, "trajectories", [{"uid": "a"}], {CPU_KEY: seconds})
    times = {"timing_s/step": 1.0, "timing_s/testing": 2.0}
    (tmp_path / "metrics-1.jsonl").write_text(json.dumps({"step": 1, "data": times}) + "\n")
    assert script.share_of(tmp_path).endswith("records took 30.0 CPU-ms per step, 0.50% of the cores")
    (tmp_path / "metrics-1.jsonl").write_text(json.dumps({"step": 1, "data": {"timing_s/step": 1.0}}) + "\n")
    with pytest.raises(SystemExit, match="1.50% of the cores, more than 1%"):
        script.share_of(tmp_path)
