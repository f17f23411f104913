"""Which weights wrote which token of a request, by counts."""

from verl_ext.fleet.boundaries import Boundaries


def test_a_request_that_meets_no_update_is_of_the_version_of_its_admission():
    boundaries = Boundaries()
    boundaries.admit("a", 3)
    assert boundaries.end("a", 7) == [(7, 3)]


def test_the_tokens_before_an_update_are_of_the_version_before_it():
    boundaries = Boundaries()
    boundaries.admit("a", 3)
    assert boundaries.cross({"a": 5}, 4) == []
    boundaries.cross({"a": 6}, 6)
    assert boundaries.end("a", 9) == [(5, 3), (1, 4), (3, 6)]


def test_a_request_without_a_token_is_all_of_the_new_version():
    boundaries = Boundaries()
    boundaries.admit("a", 3)
    assert boundaries.cross({"a": 0}, 4) == ["a"]
    assert boundaries.end("a", 2) == [(2, 4)]


def test_a_pause_without_new_weights_splits_nothing():
    boundaries = Boundaries()
    boundaries.admit("a", 3)
    boundaries.admit("b", 3)
    assert boundaries.cross({"a": 5, "b": 0}, 3) == []
    assert boundaries.end("a", 9) == [(9, 3)]


def test_tokens_that_the_server_dropped_are_in_no_run():
    """vLLM continues to sample for a step or two after a stop string."""
    boundaries = Boundaries()
    boundaries.admit("a", 3)
    boundaries.cross({"a": 5}, 4)
    assert boundaries.end("a", 5) == [(5, 3)]


def test_requests_that_were_not_admitted_or_have_ended_are_left_alone():
    boundaries = Boundaries()
    boundaries.admit("a", 3)
    boundaries.forget("a")
    assert boundaries.cross({"a": 0, "of the HTTP server": 0}, 4) == []
    assert boundaries.end("a", 2) == [(2, None)]
