"""SFT data sets of rows that a test writes."""

import pytest


@pytest.fixture
def make_dataset(tokenizer, tmp_path):
    import pandas as pd
    from omegaconf import OmegaConf

    from verl_ext.datasets.sft import RetoolSFTDataset

    def make(*files_of_rows, max_samples=-1, using=tokenizer, tools=None, **settings):
        paths = []
        for rows in files_of_rows:
            paths.append(str(tmp_path / f"{len(paths)}.parquet"))
            pd.DataFrame({"messages": rows} | ({"tools": tools} if tools else {})).to_parquet(paths[-1])
        retool = {name: settings.pop(name) for name in ("protocol", "bad_rows") if name in settings}
        config = {"messages_key": "messages", "max_length": 200, "truncation": "error"} | settings
        config["retool"] = {"protocol": "code", "bad_rows": "error"} | retool
        files = OmegaConf.create(paths) if len(paths) > 1 else paths[0]
        return RetoolSFTDataset(files, using, OmegaConf.create(config), max_samples=max_samples)

    return make
