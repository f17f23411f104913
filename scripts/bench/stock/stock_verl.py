"""Stock verl 0.9.1 for scripts/bench/chaos.py: a CPU to run on, and the form of the tiny model's calls.

verl imports this file in every process (`VERL_USE_EXTERNAL_MODULES=stock_verl`). Of verl_ext only the CPU platform is
loaded: no agent loop, sampler, reward, checkpoints, options or fleet of ours.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

import wrapt

OPEN, CLOSE = "<code>", "</code>"

if "verl_ext" not in sys.modules:  # a package without its __init__.py, which would install all our hooks
    package = ModuleType("verl_ext")
    package.__path__ = [str(Path(__file__).resolve().parents[3] / "verl_ext")]
    sys.modules["verl_ext"] = package


def use_cpu(verl: ModuleType) -> None:
    from verl_ext.cpu import activate_if_needed

    activate_if_needed(verl)


def add_parser(module: ModuleType) -> None:
    """Register the form of calls under the name `code`, by which verl's loop finds it (`multi_turn.format`)."""

    @module.ToolParser.register("code")
    class CodeParser(module.ToolParser):
        @property
        def stop_token_ids(self) -> list[int]:
            return self.tokenizer.encode(CLOSE, add_special_tokens=False)

        async def extract_tool_calls(self, responses_ids: list[int], tools: object = None) -> tuple[str, list]:
            text = self.tokenizer.decode(responses_ids)
            before, opened, rest = text.rpartition(OPEN)
            if not opened or not rest.endswith(CLOSE):
                return text, []
            arguments = json.dumps({"code": rest.removesuffix(CLOSE)})
            return before, [module.FunctionCall(name="python", arguments=arguments)]


wrapt.register_post_import_hook(use_cpu, "verl")
wrapt.register_post_import_hook(add_parser, "verl.experimental.agent_loop.tool_parser")
