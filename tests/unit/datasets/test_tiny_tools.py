import asyncio
import random
import re
import sys

import pytest

# The six questions, read with arithmetic of the test's own.
READINGS = [
    (r"has (\d+) boxes with (\d+) \w+ each and gets (\d+) more\. How many", lambda a, b, c: a * b + c),
    (r"has (\d+) boxes with (\d+) \w+ each and loses (\d+)\. How many", lambda a, b, c: a * b - c),
    (r"buys (\d+) \w+ at (\d+) cents and (\d+) more at the same price\.", lambda a, b, c: (a + c) * b),
    (r"remainder when (\d+) times (\d+) is divided by (\d+)\?", lambda a, b, c: a * b % c),
    (r"packs (\d+) \w+ into bags of (\d+)\. How many full bags", lambda a, b: a // b),
    (r"sells (\d+) \w+ at (\d+) cents and (\d+) \w+ at (\d+) cents\.", lambda a, b, c, d: a * b + c * d),
]


def solve(question):
    """(which template, its numbers, what is added at the end, the answer)."""
    found = [(kind, m, f) for kind, (pattern, f) in enumerate(READINGS) if (m := re.search(pattern, question))]
    assert len(found) == 1, question
    kind, match, formula = found[0]
    numbers = [int(n) for n in match.groups()]
    extra = int((re.search(r"Then add (\d+)\.$", question) or [0, 0])[1])
    return kind, numbers, extra, formula(*numbers) + extra


def without_names(question, task):
    return re.sub("|".join([rf"\b{name}\b" for name in task.NAMES + task.THINGS]), "_", question)


@pytest.fixture(scope="module")
def prepared(tiny_tools, tmp_path_factory):
    """seed -> {table: rows} that prepare.py wrote; `prepared.printed` what it said last."""
    import pandas as pd

    def prepare(seed, *, again=False, args=("--sft=1500", "--rl=300", "--test=96", "--ood=48")):
        if (seed, again, args) not in made:
            out = tmp_path_factory.mktemp(f"seed{seed}")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", ["prepare.py", f"--out={out}", f"--seed={seed}", *args])
                tiny_tools.prepare.main()
            made[seed, again, args] = {path.stem: pd.read_parquet(path) for path in out.glob("*.parquet")}
        return made[seed, again, args]

    made = {}
    return prepare


@pytest.mark.parametrize("split", ["train", "test", "ood_large", "ood_chain"])
def test_answers_and_formulas_are_right(tiny_tools, split):
    rng = random.Random(split)
    kinds = set()
    for _ in range(300):
        problem = tiny_tools.task.make_problem(rng, split=split)
        kind, _numbers, _extra, answer = solve(problem.question)
        kinds.add(kind)
        assert str(answer) == problem.answer == str(eval(problem.expression))
        assert problem.expression not in problem.wrong
    assert kinds == set(range(6))


def test_out_of_distribution_sets_differ_in_kind(tiny_tools):
    rng = random.Random(0)
    for _ in range(300):
        inside = solve(tiny_tools.task.make_problem(rng, split=rng.choice(["train", "test"])).question)
        large = solve(tiny_tools.task.make_problem(rng, split="ood_large").question)
        chain = solve(tiny_tools.task.make_problem(rng, split="ood_chain").question)
        for (kind, numbers, *_), low, high in ((inside, 11, 99), (large, 100, 999), (chain, 11, 99)):
            products = numbers[:1] if kind == 4 else []  # the question of the bags shows a product
            assert all(low <= n <= high for n in numbers[len(products) :])
            assert all(low**2 <= n <= high**2 for n in products)
        assert inside[2] == large[2] == 0  # nothing is added at the end
        assert 11 <= chain[2] <= 99  # one operation more than any training problem has


def test_no_test_problem_is_a_training_problem_under_other_names(tiny_tools):
    """Both splits drawn densely enough to meet: the bags' product 360 is 12 * 30 and 18 * 20."""
    rng = random.Random(0)
    drawn = {
        split: {
            without_names(tiny_tools.task.make_problem(rng, split=split).question, tiny_tools.task) for _ in range(n)
        }
        for split, n in (("train", 12_000), ("test", 4_000))
    }
    assert drawn["train"].isdisjoint(drawn["test"])


def test_an_unknown_split_or_kind_is_refused(tiny_tools):
    rng = random.Random(0)
    with pytest.raises(ValueError, match="'val'; expected train, test, ood_large or ood_chain"):
        tiny_tools.task.make_problem(rng, split="val")
    with pytest.raises(ValueError, match="'hybrid'; expected one of"):
        tiny_tools.task.make_trace(tiny_tools.task.make_problem(rng, split="train"), "hybrid", rng)


@pytest.mark.parametrize(
    ("kind", "calls"), [("mental", 0), ("tool", 1), ("wrong_formula", 1), ("repair", 2), ("give_up", 1)]
)
def test_a_trace_has_retools_roles_and_ends_in_a_box(tiny_tools, kind, calls):
    from verl_ext.protocols.code import extract_code

    rng = random.Random(kind)
    right = 0
    for _ in range(40):
        problem = tiny_tools.task.make_problem(rng, split="train")
        trace = tiny_tools.task.make_trace(problem, kind, rng)
        assert [m["role"] for m in trace] == ["user"] + ["assistant", "interpreter"] * calls + ["assistant"]
        assert trace[0]["content"] == problem.question
        for call, output in zip(trace[1:-1:2], trace[2:-1:2], strict=True):
            assert call["content"].endswith("</code>")
            assert output["content"] == tiny_tools.task.interpreter_output(extract_code(call["content"]))
        boxed = re.search(r"\\boxed\{(-?\d+)\}$", trace[-1]["content"])[1]
        right += boxed == problem.answer
        if kind not in ("mental", "give_up"):
            assert trace[-2]["content"] == boxed  # copied from the interpreter
    assert right == 40 or (kind == "wrong_formula" and right < 10)  # a wrong formula may hit by chance


@pytest.mark.parametrize("kind", ["mental", "tool", "wrong_formula", "repair", "give_up"])
def test_a_trace_without_the_tool_asks_and_answers_the_same(tiny_tools, kind):
    rng = random.Random(kind)
    for _ in range(40):
        trace = tiny_tools.task.make_trace(tiny_tools.task.make_problem(rng, split="train"), kind, rng)
        question, said = tiny_tools.task.without_tool(trace)
        assert question == trace[0] and said["role"] == "assistant" and "<code>" not in said["content"]
        box = trace[-1]["content"].rpartition("\\boxed")[2]
        assert said["content"].endswith(f"\\boxed{box}")
        if kind not in ("mental", "give_up"):
            *_, last, _ = said["content"].split(" ")
            assert last.endswith(f"={box[1:-1]}."), "the last operation gives the answer"


def test_a_formula_is_worked_out_operation_by_operation(tiny_tools):
    assert tiny_tools.task.work_out("(12+3)*40") == "12+3=15. 15*40=600."
    assert tiny_tools.task.work_out("50*23+20*50") == "50*23=1150. 20*50=1000. 1150+1000=2150."
    assert tiny_tools.task.work_out("3*(5-9)%7") == "5-9=-4. 3*-4=-12. -12%7=2."


def test_text_rl_gets_the_same_problems(tiny_tools):
    rngs = [random.Random(5), random.Random(5)]
    for _ in range(50):
        pair = [tiny_tools.prepare.sft_row(rng, no_tool=no_tool) for rng, no_tool in zip(rngs, (0, 1), strict=True)]
        assert pair[0]["messages"][0] == pair[1]["messages"][0] and pair[0]["kind"] == pair[1]["kind"]
        assert len(pair[1]["messages"]) == 2
    assert rngs[0].random() == rngs[1].random(), "so the problems of RL, drawn afterwards, are the same as well"


def test_the_mixture_names_every_kind_and_adds_up(tiny_tools):
    assert sum(tiny_tools.task.TRACE_MIX.values()) == pytest.approx(1.0)
    assert list(tiny_tools.task.TRACE_MIX) == ["mental", "tool", "wrong_formula", "repair", "give_up"]


def test_the_traces_interpreter_says_what_the_real_sandbox_says(tiny_tools):
    from verl_ext.protocols.base import format_output
    from verl_ext.protocols.code import extract_code
    from verl_ext.sandbox.client import SandboxClient
    from verl_ext.sandbox.launch import running_server

    rng = random.Random(0)
    codes = {"print(1)\nraise ValueError('no')", "x = (", "  print(1)"}
    for kind in ("tool", "wrong_formula", "repair", "give_up"):
        for _ in range(6):
            trace = tiny_tools.task.make_trace(tiny_tools.task.make_problem(rng, split="train"), kind, rng)
            codes |= {extract_code(m["content"]) for m in trace if m["content"].endswith("</code>")}
    errors = {tiny_tools.task.interpreter_output(code).split(":")[0] for code in codes}
    assert {"SyntaxError", "NameError", "(no output)"} <= errors  # all three faulty snippets are among them

    async def ask(url):
        client = SandboxClient([url])
        try:
            return await asyncio.gather(*(client.run(code, timeout_s=20) for code in sorted(codes)))
        finally:
            await client.aclose()

    with running_server() as url:
        results = asyncio.run(ask(url))
    said = {
        c: format_output(r.stdout, r.stderr, traceback="last_line") for c, r in zip(sorted(codes), results, strict=True)
    }
    assert said == {code: tiny_tools.task.interpreter_output(code) for code in codes}


def test_prepare_writes_verls_columns(prepared):
    tables = prepared(0)
    assert {name: len(rows) for name, rows in tables.items()} == {
        "sft_train": 1500,
        "sft_val": 512,
        "rl_train": 300,
        "eval": 96 + 48 + 48,
    }
    counts = tables["eval"]["data_source"].value_counts().to_dict()
    assert counts == {"tiny_tools": 96, "tiny_tools_ood_large": 48, "tiny_tools_ood_chain": 48}
    for name in ("rl_train", "eval"):
        row = tables[name].iloc[-1]
        assert [message["role"] for message in row["prompt"]] == ["user"] and row["ability"] == "math"
        answer = solve(row["prompt"][0]["content"])[-1]
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(answer)}
        assert set(row["extra_info"]) == {"index", "split", "key"}
    shares = tables["sft_train"]["kind"].value_counts(normalize=True)
    assert shares["mental"] == pytest.approx(0.5, abs=0.05) and shares["give_up"] == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_training_prompt_is_an_evaluation_prompt(prepared, tiny_tools, seed):
    tables = prepared(seed)
    asked = {
        name: [without_names(messages[0]["content"], tiny_tools.task) for messages in column]
        for name, column in [
            *((name, tables[name]["prompt"]) for name in ("rl_train", "eval")),
            *((name, tables[name]["messages"]) for name in ("sft_train", "sft_val")),
        ]
    }
    held_out = set(asked.pop("eval"))
    for name, questions in asked.items():
        assert held_out.isdisjoint(questions), name
    keys = {name: {info["key"] for info in tables[name]["extra_info"]} for name in ("rl_train", "eval")}
    assert len(keys["rl_train"]) == 300 and len(keys["eval"]) == 192  # each problem once
    assert keys["rl_train"].isdisjoint(keys["eval"])


def test_prepare_is_deterministic_and_all_seeds_share_the_evaluation_problems(prepared):
    first, again, other = prepared(0), prepared(0, again=True), prepared(1)
    plain = {name: rows.map(str) for name, rows in first.items()}
    for name, rows in plain.items():
        assert rows.equals(again[name].map(str)), name
        assert rows.equals(other[name].map(str)) == (name == "eval"), name


def test_a_problem_that_is_drawn_again_is_not_taken_again(tiny_tools, monkeypatch):
    rng = random.Random(0)
    one, other = (tiny_tools.task.make_problem(rng, split="test") for _ in range(2))
    draws = iter([one, one, other])
    monkeypatch.setattr(tiny_tools.prepare, "make_problem", lambda rng, split: next(draws))
    assert tiny_tools.prepare.distinct_problems(rng, "test", 2) == [one, other]


def test_prepare_makes_small_sets_too(prepared, capsys):
    tables = prepared(3, args=("--sft=1", "--rl=1", "--test=1", "--ood=1"))
    assert [len(tables[name]) for name in ("sft_train", "rl_train", "eval")] == [1, 1, 3]
    assert re.search(r"one trace:\n +user: .*\n +assistant: ", capsys.readouterr().out)


def test_tokenizer_spells_numbers_digit_by_digit_and_loses_nothing(tiny_tools, tokenizer):
    rng = random.Random(0)
    for kind in tiny_tools.task.TRACE_MIX:
        for message in tiny_tools.task.make_trace(tiny_tools.task.make_problem(rng, split="train"), kind, rng):
            ids = tokenizer.encode(message["content"], add_special_tokens=False)
            assert tokenizer.decode(ids) == message["content"]
            tokens = tokenizer.convert_ids_to_tokens(ids)
            assert all(len(token) == 1 for token in tokens if re.search(r"[0-9+*%()]", token))
    text = "a [1 , 2] . é\n\n\tdon 't"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for tag in tiny_tools.build_model.PROTOCOL_TOKENS:
        assert len(tokenizer.encode(tag, add_special_tokens=False)) == 1
        assert tokenizer.decode(tokenizer.encode(tag), skip_special_tokens=True) == tag  # visible to stop strings


def test_the_tokenizer_does_not_depend_on_the_run(tiny_tools, tokenizer):
    assert tiny_tools.build_model.build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_initial_weights_are_those_of_the_seed(tiny_tools, tokenizer):
    import torch

    one, same, other = (tiny_tools.build_model.build_model(tokenizer, seed) for seed in (0, 0, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    assert {p.dtype for p in one.parameters()} == {torch.float32}
    assert one.config.hidden_size // one.config.num_attention_heads == 32  # vLLM's CPU attention refuses 16
    assert one.generation_config.eos_token_id == tokenizer.eos_token_id
