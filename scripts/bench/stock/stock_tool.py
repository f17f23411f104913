"""The tool and the reward that a user of verl would write for the tiny task, for scripts/bench/chaos.py
(`function_tool_path`, `custom_reward_function.path`).
"""

import os
import re

import httpx
from verl.tools.function_tool import function_tool

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
client = httpx.Client(timeout=60, trust_env=False)  # through no proxy of the environment


@function_tool("python")
def python(code: str) -> str:
    """Run Python code.

    Args:
        code: the program.
    """
    body = {"code": code, "language": "python", "run_timeout": 5}
    run = client.post(f"{os.environ['SANDBOX_URL']}/run_code", json=body).json()["run_result"]
    return (run["stdout"] or run["stderr"].strip().rpartition("\n")[2]).strip()


def judge(judge_url: str, response: str, ground_truth: str) -> float:
    """Return the verdict of a model over HTTP: +1 or -1."""
    prompt = f"<reference_answer>\n{ground_truth}\n</reference_answer>\n<response>\n{response}\n</response>"
    body = {"model": "judge", "messages": [{"role": "user", "content": prompt}]}
    said = client.post(f"{judge_url}/chat/completions", json=body).json()
    return 2 * float(said["choices"][0]["message"]["content"].removeprefix("Score: ")) - 1


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Return +1 if the last box has the answer, else -1."""
    if judge_url := os.environ.get("JUDGE_URL"):
        return judge(judge_url, solution_str, ground_truth)
    found = BOXED.findall(solution_str)
    return 1.0 if found and found[-1] == ground_truth else -1.0
