"""The quick part's tokenizer against transformers': the same texts and the same tokens."""

import json
from pathlib import Path

import pytest

from verl_ext.doctor.template import check_tokenizer
from verl_ext.doctor.tokens import NoTokenizer, QuickTokenizer, quick_tokenizer
from verl_ext.protocols.base import CODE_SCHEMA

CALL = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print('é<&>')"}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1? <b>&amp;</b> 数"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
]


@pytest.fixture(params=["tiny", "qwen"])
def both(request, tokenizer, qwen_tokenizer, tmp_path):
    """(transformers', the quick one)."""
    full = tokenizer if request.param == "tiny" else qwen_tokenizer
    full.save_pretrained(tmp_path / "model")
    return full, QuickTokenizer(tmp_path / "model")


@pytest.mark.parametrize("tools", [None, [CODE_SCHEMA]])
@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_are_rendered_and_encoded_as_transformers_does(tools, length, add_generation_prompt, both):
    full, quick = both
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    text = full.apply_chat_template(CONVERSATION[:length], **options)
    assert quick.apply_chat_template(CONVERSATION[:length], **options) == text
    ids = full.encode(text, add_special_tokens=False)
    assert quick.encode(text) == ids and quick.decode(ids) == full.decode(ids)


def test_names_and_numbers_are_those_of_transformers(both):
    full, quick = both
    assert (quick.eos_token, len(quick)) == (full.eos_token, len(full))
    assert {*quick.all_special_tokens} == {*full.all_special_tokens}
    assert {*quick.all_special_ids} == {*full.all_special_ids}
    added = [{i: (each.content, each.special) for i, each in one.added_tokens_decoder.items()} for one in both]
    assert added[0] == added[1]


LIST, NAMED = ["<code>", "<new>"], {"code_token": "<code>", "new_token": "<new>"}


@pytest.mark.parametrize(
    ("key", "tokens", "form"),
    [
        ("additional_special_tokens", LIST, "config"),
        ("additional_special_tokens", LIST, "map"),
        ("extra_special_tokens", LIST, "config"),
        ("extra_special_tokens", LIST, "map"),
        ("extra_special_tokens", NAMED, "config"),
        ("extra_special_tokens", NAMED, "map"),
        ("extra_special_tokens", [{"content": "<code>"}, {"content": "<new>"}], "map"),
    ],
)
def test_further_special_tokens_are_those_of_transformers(key, tokens, form, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)  # with it, transformers reads no special_tokens_map.json
    if form == "config":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {key: tokens}))
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({key: tokens}))
    full, quick = AutoTokenizer.from_pretrained(tmp_path), QuickTokenizer(tmp_path)
    assert {*quick.all_special_tokens} == {*full.all_special_tokens} > {"<code>", "<new>"}
    assert {*quick.all_special_ids} == {*full.all_special_ids} and len(quick) == len(full)
    assert quick.encode("1 <code> <new>") == full.encode("1 <code> <new>", add_special_tokens=False)
    template = "{{ eos_token }}{{ code_token }}"
    assert _rendered(quick, template) == _rendered(full, template)


def _rendered(tokenizer, template: str) -> str:
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(CONVERSATION, tokenize=False)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "{{ messages[0] | tojson }}|{{ tools | tojson(indent=2) }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ eos_token }}{{ loud }}",
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.n }}",
        "  {% if true %}\n  a\n  {% endif %}\n b",
    ],
)
def test_what_templates_may_use(template, both):
    full, quick = both
    options = {"tools": [CODE_SCHEMA], "tokenize": False, "loud": "LOUD"}
    quick.chat_template = template
    expected = full.apply_chat_template(CONVERSATION, chat_template=template, **options)
    assert quick.apply_chat_template(CONVERSATION, **options) == expected


@pytest.mark.parametrize("form", ["jinja", "config", "named", "json"])
def test_where_a_folder_keeps_its_template(form, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if form == "jinja":
        (tmp_path / "chat_template.jinja").write_text("T")
    elif form == "json":
        (tmp_path / "chat_template.json").write_text('{"chat_template": "T"}')
    else:
        named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]
        config["chat_template"] = "T" if form == "config" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chosen = QuickTokenizer(tmp_path).chat_template
    assert chosen == ({"tool_use": "U", "default": "T"} if form == "named" else "T")
    assert QuickTokenizer(tmp_path, "mine").chat_template == "mine"


@pytest.mark.parametrize("form", ["config", "files"])
@pytest.mark.parametrize("tools", [None, [], [CODE_SCHEMA]])
def test_of_several_templates_tools_choose_theirs(form, tools, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    templates = {"default": "D", "tool_use": "T{{ tools | length }}", "rag": "R"}
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    if form == "config":
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    else:  # as transformers saves them
        full = AutoTokenizer.from_pretrained(tmp_path)
        full.chat_template = templates
        full.save_pretrained(tmp_path)
        assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    full, quick = AutoTokenizer.from_pretrained(tmp_path), QuickTokenizer(tmp_path)
    expected = full.apply_chat_template(CONVERSATION, tools=tools, tokenize=False)
    assert quick.apply_chat_template(CONVERSATION, tools=tools) == expected
    assert QuickTokenizer(tmp_path, "mine").chat_template == "mine"


def test_templates_without_a_default_are_refused(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    for one in (QuickTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        one.chat_template = {"rag": "R"}
        with pytest.raises(ValueError, match="no default"):
            one.apply_chat_template(CONVERSATION, tokenize=False)


def test_which_paths_have_none(tokenizer, tmp_path):
    def reason(path: str) -> str:
        with pytest.raises(NoTokenizer) as caught:
            quick_tokenizer(path, tmp_path, None)
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert "the folder has none of tokenizer.json" in reason("empty")
    for path in (f"{tmp_path}/nowhere", "outputs/sft", "outputs/a/b", "./model", "~/nowhere"):
        assert "there is no such folder" in reason(path), path
    assert quick_tokenizer("Qwen/Qwen2.5-7B", tmp_path, None) is None
    assert quick_tokenizer("gpt2", tmp_path, None) is None
    (tmp_path / "empty" / "tokenizer.model").write_text("")
    assert quick_tokenizer("empty", tmp_path, None) is None, "only transformers reads it"
    (tmp_path / "empty" / "tokenizer.json").write_text("{")
    assert "EOF" in reason("empty")


def test_the_template_checks_find_the_same_with_both(both, make_run, tmp_path):
    full, quick = both
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    tool = Path(__file__).parents[3] / "configs" / "tools" / "code_interpreter.yaml"
    for protocol in ("code", "hermes"):
        key = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tool}"
        run = make_run("tiny_dapo", f"retool.protocol={protocol}", key)
        assert [*check_tokenizer(run, quick)] == [*check_tokenizer(run, full)]
