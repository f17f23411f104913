"""What the quickstart can make: the models and tasks that `--model` names, and what differs between them."""

from dataclasses import dataclass
from pathlib import Path

from verl_ext.quickstart.options import REPO


@dataclass(frozen=True)
class Rung:
    """One model with its task; `name` as `--model` has it. `tools` has prepare.py and build_model.py."""

    name: str
    tools: Path
    sft_launcher: str  # in recipe/retool
    rl_launcher: str
    model_seed: bool  # whether build_model.py draws weights, by `--seed`
    shares_python: bool  # one server forks the processes of all stages; else each launcher sets its own threads
    titles: tuple[str, str]  # of the data's step and the SFT's


RUNGS = {
    "tiny": Rung(
        name="tiny",
        tools=REPO / "data" / "tiny_tools",
        sft_launcher="run_tiny_sft.sh",
        rl_launcher="run_tiny_dapo.sh",
        model_seed=True,
        shares_python=True,
        titles=("word problems, tokenizer, random model", "multi-turn SFT, FSDP2 on two ranks"),
    ),
    "small": Rung(
        name="small",
        tools=REPO / "data" / "small",
        sft_launcher="run_smollm2_sft.sh",
        rl_launcher="run_smollm2_dapo.sh",
        model_seed=False,
        shares_python=False,
        titles=("word problems; SmolLM2-135M-Instruct, weights from 4 bits", "multi-turn SFT, FSDP2"),
    ),
}
