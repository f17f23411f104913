import sys

import pandas as pd


def row(item: str, price: int, n: int) -> dict:
    return {
        "data_source": "shop",  # picks the verifier
        "prompt": [{"role": "user", "content": f"What do {n} of {item} cost? Put the number in \\boxed{{}}."}],
        "reward_model": {"ground_truth": str(n * price)},
        "extra_info": {"index": 100 * n + price, "tool_selection": ["price_of"]},  # no other tool is in the prompt
    }


for file, numbers in {"rl_train": range(2, 34), "eval": range(34, 42)}.items():
    rows = [row(item, price, n) for item, price in (("bread", 7), ("cheese", 12)) for n in numbers]
    pd.DataFrame(rows).to_parquet(f"{sys.argv[1]}/{file}.parquet")
