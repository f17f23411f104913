"""Texts within Hydra's overrides."""

import re


def quoted(text: str) -> str:
    """Return a text in the quotation marks of Hydra's overrides, as a value of `KEY=VALUE` or of a dictionary there."""
    text = re.sub(r"(\\+)(?='|\Z)", r"\1\1", text)  # elsewhere a backslash stands for itself
    return "'{}'".format(text.replace("'", "\\'"))
