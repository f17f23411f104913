"""A rule of Landlock that cannot be added is noticed."""

import json
import os

import pytest

from tests.unit.sandbox.server.test_isolation import REFUSE, UNSHARE, needs_x86_64, running
from verl_ext.sandbox.server import landlock

ADD_RULE = [445, None]


def test_rule_for_a_path_that_is_missing_is_an_error_that_names_it(tmp_path):
    try:
        landlock.version()
    except OSError:
        pytest.skip("no Landlock on this machine")
    missing = str(tmp_path / "missing")
    for kind in ("readable", "writable", "devices"):
        paths = {"readable": [], "writable": [], "devices": []} | {kind: ["/usr", missing]}
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=f"no Landlock rule for {missing}: No such file"):
            landlock.make_ruleset(**paths, execute=False)
        assert len(os.listdir("/proc/self/fd")) == before
    os.close(landlock.make_ruleset(readable=["/usr"], writable=[str(tmp_path)], devices=["/dev/null"], execute=False))


@needs_x86_64
def test_layer_whose_rules_cannot_be_added_is_off():
    with running(REFUSE, json.dumps([UNSHARE, ADD_RULE])) as client:
        assert "landlock" not in client.layers
