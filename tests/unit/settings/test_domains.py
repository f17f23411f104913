"""The table of domains: what a row of it says, and what the whole run says instead."""

import pytest
from omegaconf import OmegaConf

from verl_ext.settings import Retool, compose_run
from verl_ext.settings.checks import check
from verl_ext.settings.domains import check_sources, read_domains, use_files


def run_with(table, **more):
    config = compose_run("tiny_dapo")
    OmegaConf.set_struct(config, False)
    return OmegaConf.merge(config, {"retool": {"domains": table, **more}})


def test_what_a_domain_leaves_out_is_the_runs_own_value():
    table = {"sums": {"weight": 3, "environment": "notebook", "response_tokens": 50}, "code/x": {}}
    config = run_with(table, max_tool_calls=7)
    check(config.retool, Retool)
    sums, code = read_domains(config).values()
    assert (sums.weight, sums.environment, sums.response_tokens, sums.max_tool_calls) == (3, "notebook", 50, 7)
    assert (code.weight, code.environment, code.protocol) == (1.0, "python", config.retool.protocol)
    assert code.response_tokens == config.data.max_response_length
    assert read_domains(compose_run("tiny_dapo")) == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"wieght": 1}, "retool.domains.sums.wieght is not a setting.*Did you mean retool.domains.sums.weight"),
        ({"weight": -1}, r"retool.domains.sums.weight is -1, expected a number in \[0, inf\)"),
        ({"protocol": "xml"}, "retool.domains.sums.protocol is 'xml'; expected one of code, hermes"),
        ({"environment": 3}, "expected a string or a section or a list"),
        ({"weight": 0}, "every weight is 0"),
        (None, "retool.domains.sums is None, but it is a section"),
    ],
)
def test_a_wrong_row_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        read_domains(run_with({"sums": row}))


def test_a_bound_on_every_response_bounds_a_domains_and_the_start_says_so():
    config = run_with({"sums": {"response_tokens": 10**6}})
    assert read_domains(config)["sums"].response_tokens == config.data.max_response_length
    with pytest.raises(ValueError, match="sums.response_tokens is 1000000, above data.max_response_length"):
        check_sources(config, "val", [])


def test_the_start_of_a_run_refuses_a_wrong_row_too():
    with pytest.raises(ValueError, match="wieght is not a setting"):
        check(run_with({"sums": {"wieght": 1}}).retool, Retool)


def test_files_of_domains_replace_the_runs():
    config = run_with({"sums": {"train": ["a.parquet", "b.parquet"]}, "code": {"train": "c.parquet"}})
    val = config.data.val_files
    use_files(config)
    use_files(config)
    assert list(config.data.train_files) == ["a.parquet", "b.parquet", "c.parquet"] and config.data.val_files == val


def test_rows_and_table_must_fit():
    config = run_with({"sums": {}, "code": {}, "held_out": {"weight": 0}})
    check_sources(config, "train", ["sums", "code", "sums"])
    check_sources(config, "val", ["held_out"])
    check_sources(compose_run("tiny_dapo"), "train", ["anything"])
    with pytest.raises(ValueError, match=r"does not name: 'chat' \(2 rows\)"):
        check_sources(config, "val", ["chat", "sums", "chat"])
    with pytest.raises(ValueError, match="gives code a weight, but data.train_files has no row"):
        check_sources(config, "train", ["sums"])
