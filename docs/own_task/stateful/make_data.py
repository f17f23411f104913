import json
import sys

import pandas as pd


def row(cheese: int, bread: int) -> dict:
    wanted = {"cheese": cheese, "bread": bread}
    calls = [{"name": "put", "arguments": {"item": item, "count": count}} for item, count in wanted.items()]
    return {
        "data_source": "basket",
        "prompt": [{"role": "user", "content": f"Fill the basket: {cheese} cheese, {bread} bread."}],
        "reward_model": {"ground_truth": json.dumps(wanted)},  # the environment reads it
        "extra_info": {"index": 100 * cheese + bread, "gold_calls": json.dumps(calls)},  # the doctor tries them
    }


for file, numbers in {"rl_train": range(1, 9), "eval": range(9, 13)}.items():
    rows = [row(cheese, bread) for cheese in numbers for bread in numbers]
    pd.DataFrame(rows).to_parquet(f"{sys.argv[1]}/{file}.parquet")
