"""The identity of a problem: which rows of a data set, and so which samples, are draws of the same one.

Everything that groups by problem uses it: the records, the reward manager (for verl's own dumps), an evaluation, the
figures, pass rates and adaptive sampling.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any


def problem_of(row: Mapping[str, Any]) -> str:
    """Return a name of a row's problem that is the same in all steps and runs; "" for a row without a prompt.

    It is a hash of the data source, of `extra_info.id` (else `extra_info.index`), and of the whole prompt and the
    ground truth. Rows that agree in all of these are one problem, for example if a data set repeats its rows. The
    prompt and the ground truth always count, because problems made from one template share an id, and because verl
    gives every row without an index the index 0.

    Args:
        row: of a data set, its prompt as messages in `raw_prompt`.
    """
    if row.get("raw_prompt") is None:
        return ""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    name = id_of(row) or f"row {id_of(row, 'index')}"
    content = [str(row.get("data_source") or ""), name, canonical(row["raw_prompt"]), canonical(truth)]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def id_of(row: Mapping[str, Any], field: str = "id") -> str:
    """Return a field of `extra_info` that names the row, as text; "" if the row has none.

    1, "1" and 1.0 are the same name: a column of whole numbers in which one is missing is read as floats.
    """
    info = row.get("extra_info")
    value = info.get(field) if isinstance(info, Mapping) else None
    value = value.item() if value is not None and hasattr(value, "item") else value
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    return "" if value is None else canonical(value)


def canonical(value: Any) -> str:
    """Return a value as text: a text as it is, anything else as JSON with its keys in order."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, default=as_plain)


def as_plain(value: Any) -> Any:
    """Return what JSON can hold in place of a value of numpy, or of any other type; for `json.dumps`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
