"""The sandbox as a verl tool, `code_interpreter`, for models that call tools in hermes' JSON. See configs/tools.

    actor_rollout_ref.rollout.multi_turn.tool_config_path=configs/tools/code_interpreter.yaml

Written for verl 0.9.1 (verl/tools/base_tool.py).
"""

from collections.abc import Mapping
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_ext.environments.shared_client import SETTINGS, shared_client
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable
from verl_ext.outcome import RolloutEnd
from verl_ext.protocols.base import format_output, strip_fence

OWN_SETTINGS = {
    "timeout_s": 30,  # of the model's code
    "memory_limit_mb": 1024,  # per call
    "echo_last_expression": False,  # the code runs as the model wrote it
    "traceback": "full",  # or last_line
}


class SandboxFailure(ToolUnavailable):
    """The sandbox, not the model's code, failed."""


class CodeInterpreter(BaseTool):
    """Runs the argument `code` in a fresh interpreter.

    Args:
        config: `urls` and further settings of `shared_client`; those of OWN_SETTINGS; `type`, which is verl's.
        tool_schema: the schema that the model sees; the YAML sets its name and describes its one argument `code`.
    Raises:
        ValueError: an unknown setting (OmegaConf would accept it silently), or no `urls`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        unknown = set(config) - {"type", *SETTINGS, *OWN_SETTINGS}
        if unknown or not config.get("urls"):
            raise ValueError(
                f"The tool {self.name!r} has the settings {sorted(config)}: expected `urls`, and otherwise only "
                f"{sorted({*SETTINGS, *OWN_SETTINGS})}. Correct the tool YAML."
            )
        self.settings = OWN_SETTINGS | config
        self.client = shared_client(config)

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run `parameters["code"]`.

        Returns:
            The text that the model reads, a reward of 0.0, and `status`, `run_s`, `queue_s` of the call.
        Raises:
            ToolError: there is no code. Like any exception of a tool, verl's own loop shows it to the model.
            SandboxFailure: after all retries. The rollout's `finish_reason` (in verl's `agent_data.extra_fields`) is
                then `sandbox_failure`, by which the reward manager and the sampler leave it out.
        """
        code = parameters.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ToolError(f"{self.name} needs the argument 'code', a string with a program, got {code!r:.80}")
        timeout_s = self.settings["timeout_s"]
        result = await self.client.run(
            strip_fence(code),
            timeout_s=timeout_s,
            memory_limit_mb=self.settings["memory_limit_mb"],
            echo_last_expression=self.settings["echo_last_expression"],
        )
        if result.status == "sandbox_failure":
            if agent_data := kwargs.get("agent_data"):
                agent_data.extra_fields["finish_reason"] = RolloutEnd.SANDBOX_FAILURE.value
            raise SandboxFailure(result.message)
        text = format_output(result.stdout, result.error_text(timeout_s), traceback=self.settings["traceback"])
        return ToolResponse(text=text), 0.0, {"status": result.status, "run_s": result.run_s, "queue_s": result.queue_s}
