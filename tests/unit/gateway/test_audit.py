"""What the audit says of chat templates that keep a conversation, and of templates that change it."""

import copy
import sys

import pytest

from tests.unit.gateway.conftest import user
from verl_ext.gateway.__main__ import main
from verl_ext.gateway.audit import KINDS, audit
from verl_ext.gateway.session import Sampled, Session
from verl_ext.gateway.template import Template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def findings(tokenizer):
    """Audit a template whose turns have this content, after a text that stands before all of them."""

    def of(content="m.content", before="", tools=False, template=CHATML, **kwargs):
        other = copy.deepcopy(tokenizer)
        other.chat_template = before + template.replace("CONTENT", content)
        return {finding.check: finding for finding in audit(other, kwargs, tools=tools)}

    return of


def levels(findings):
    return {name: finding.level for name, finding in findings.items() if finding.level != "pass"}


def test_a_template_that_shows_what_was_written_passes(qwen_tokenizer, findings):
    found = audit(qwen_tokenizer)
    assert {finding.level for finding in found} == {"pass"} and len(found) == len(KINDS) + 8
    assert [finding.rows for finding in found[: len(KINDS)]] == [1] * len(KINDS)
    assert "You are Qwen" in found[-1].told and found[-1].check == "the template adds a system prompt"
    assert levels(findings()) == {}


def test_qwen3_forks_only_where_a_user_speaks_after_thoughts(qwen3_tokenizer):
    for kwargs in ({}, {"enable_thinking": False}):
        found = {finding.check: finding for finding in audit(qwen3_tokenizer, kwargs)}
        assert levels(found) == {"thoughts, then a user": "fork"}
        assert found["thoughts, then a user"].rows == 3
    assert str(found["thoughts, then a user"]).splitlines()[1].strip().startswith("first difference at token ")


def test_the_first_difference_is_told_with_its_neighbourhood(findings):
    found = findings("m.content.split('</think>')[-1].lstrip()")
    assert levels(found) == {"thoughts, then a user": "fork"}
    first, ours, shown = found["thoughts, then a user"].told.splitlines()
    assert first.startswith("first difference at token ")
    assert "assistant\\n' ['<']" in ours and "think" in ours and "assistant\\n' ['I']" in shown


@pytest.mark.parametrize("content", ["m.content.strip()", "m.content | trim"])
def test_white_space_that_a_template_removes_costs_nothing(findings, content):
    assert levels(findings(content)) == {}


def test_tools_that_a_template_does_not_show_are_a_failure(findings):
    found = levels(findings(tools=True))
    assert {name for name, level in found.items() if level == "fail"} == {
        "tools are shown",
        "calls and content: null are shown",
        *(kind.name for kind in KINDS if kind.tools),
    }


def test_calls_in_a_form_that_the_gateway_does_not_read_are_told(findings):
    found = findings("m.content ~ (m.tool_calls | tojson if m.tool_calls else '') ~ (tools or '') | tojson", tools=True)
    told = found["calls"].told
    assert found["calls"].level == "fail" and 'the gateway reads <tool_call>{"name": ..., "arguments"' in told


REFUSE = "{{ raise_exception('No') }}{% endif %}"
REFUSALS = {
    "a later system message is shown": "{% if 'system' in messages[2:] | map(attribute='role') | list %}" + REFUSE,
    "two users in a row are shown": "{% if messages[-2:] | map(attribute='role') | list == ['user'] * 2 %}" + REFUSE,
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_template_refuses_is_a_failure(findings, name):
    found = findings(before=REFUSALS[name])
    assert found[name].level == "fail" and "No" in found[name].told


def test_a_later_message_that_is_dropped_and_a_template_without_a_prompt_are_failures(findings):
    found = findings("m.content if loop.first or m.role != 'system' else ''")
    assert levels(found) == {"a later system message is shown": "fail"}
    (finding,) = findings(template=CHATML.replace("add_generation_prompt", "false")).values()
    assert finding.level == "fail" and "no generation prompt" in finding.told


def test_a_template_that_asks_for_the_day_is_told_that_it_stands_still(findings):
    found = findings(before="Today is {{ strftime_now('%d %b %Y') }} for you.")
    assert levels(found) == {} and found["the template asks for the date"].told == "it always gets 2024-07-26"


def test_a_turn_may_end_with_the_next_roles_token(tokenizer):
    """GLM's way: the model ends its turn with the token that begins the user's, and no template closes a turn."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    other.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    session, ids = Session(Template(other), 1000), other.encode("\nfine<|user|>", add_special_tokens=False)
    node = session.add(session.place([user("hello")]), Sampled(ids), max_tokens=100)
    place = session.place([user("hello"), node.message, user("and?")])
    assert node.end == "<|user|>" and place.parent is node
    assert other.decode(place.context) == "\nand?<|assistant|>"


@pytest.mark.parametrize(
    ("content", "prompt", "answer"),
    [
        ("'<think></think>\n' ~ m.content", "", "fine"),
        ("m.content.split('</think>')[-1]", "<think>\n", "\n</think>\n\nfine"),
    ],
    ids=["GLM's way", "DeepSeek's way"],
)
def test_an_empty_block_of_thoughts_right_after_the_role_costs_nothing(tokenizer, content, prompt, answer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        f"{{{{ ({content}) if m.role == 'assistant' else m.content }}}}<|im_end|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant{{{{ {prompt!r} }}}}{{% endif %}}"
    )
    session = Session(Template(other), 1000)
    ids = [*other.encode(answer, add_special_tokens=False), other.eos_token_id]
    node = session.add(session.place([user("hello")]), Sampled(ids), max_tokens=100)
    assert session.place([user("hello"), node.message, user("and?")]).parent is node


def test_a_tokenizer_without_an_end_token_fails(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.eos_token = None
    (finding,) = audit(other)
    assert finding.level == "fail" and "has no end token" in finding.told


def test_the_command_prints_its_findings_and_ends_with_1_if_one_fails(tokenizer, tmp_path, monkeypatch, capsys):
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "other.jinja").write_text("nothing")
    for options, code, line in (
        ([], 1, "fail  tools are shown"),
        (["--no-tools"], 0, "pass  answers                                1 row"),
        (["--template", str(tmp_path / "other.jinja")], 1, "fail  answers"),
    ):
        monkeypatch.setattr(sys, "argv", ["x", "audit", str(tmp_path / "model"), *options])
        assert main() == code
        assert line in capsys.readouterr().out


def test_a_folder_without_a_tokenizer_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "audit", str(tmp_path / "no such folder")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no such folder" in capsys.readouterr().err
