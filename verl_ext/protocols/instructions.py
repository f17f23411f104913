"""The instructions that go with a problem: what a prompt says of the tool and of the form of the answer.

In: a prompt's text. Out: the problem by itself, or with the instructions of another protocol.
"""

import re

# Instructions that go with the problem: the key is `retool.protocol` of the run, and after "_" which of its texts. SFT
# and RL data need the same.
PROMPTS = {
    # ReTool's own (arXiv:2504.11536; every row of JoeYing/ReTool-SFT), except that code and answer are as our protocol
    # writes them: no Markdown fence, no <answer> tags, and \boxed{} without the doubled braces of a format string.
    "code": (
        "Solve the following problem step by step. You now have the ability to selectively write executable Python "
        "code to enhance your reasoning process. The Python code will be executed by an external sandbox, and the "
        "output (wrapped in `<interpreter>output_str</interpreter>`) can be returned to aid your reasoning and help "
        "you arrive at the final answer. The Python code should be complete scripts, including necessary imports.\n"
        "Each code snippet is wrapped with `<code>\ncode snippet\n</code>`.\n"
        "The last part of your response should be in the following format:\n"
        "\\boxed{{'The final answer goes here.'}}\n\n"
        "*user question:*\n{problem}"
    ),
    # The code protocol for a model that is too small for the text above.
    "code_short": (
        "Solve the problem with Python: write code between <code> and </code>, read its output, then put the answer in "
        "\\boxed{{}}.\n\n{problem}"
    ),
    # ReTool's own without the tool: what Python adds is measured against it.
    "text": (
        "Solve the following problem step by step.\n"
        "The last part of your response should be in the following format:\n"
        "\\boxed{{'The final answer goes here.'}}\n\n"
        "*user question:*\n{problem}"
    ),
    "text_short": (
        "Solve the problem: write the calculation and its result, then put the answer in \\boxed{{}}.\n\n{problem}"
    ),
    # From the published run: the tool's schema, in the system prompt, says how to call it (verl-recipe@2ae2c59,
    # retool/retool_dataset_utils.py).
    "hermes": "{problem}\nThe answer format must be: \\boxed{{'The final answer goes here.'}}",
}

# Instructions that public data sets carry around a problem: (before, after).
_WRAPPERS = [
    (  # BytedTsinghua-SIA/DAPO-Math-17k. It asks for "Answer: ...", which a scorer of \boxed{} never sees.
        r"Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
        r"\$Answer \(without quotes\) where \$Answer is the answer to the problem\.",
        r'Remember to put your answer on its own line after "Answer:"\.',
    ),
    (  # JoeYing/ReTool-SFT, and what verl's recipe made of it
        r"(?:Solve the following problem step by step\..*?)?\*user question:\*\s*"
        r"(?:Answer the following Math Problem and put the answer in the format of \\boxed\{+answer\}+)?",
        r"(?:Remember to place the final answer in the last part using the format:\s*"
        r"(?:<answer>\s*)?\\boxed\{+'The final answer goes here\.'\}+\s*(?:</answer>)?)?",
    ),
    (
        r"Solve the problem with Python: write code between <code> and </code>, read its output, then put the answer "
        r"in \\boxed\{\}\.",
        r"",
    ),
    (r"Solve the problem: write the calculation and its result, then put the answer in \\boxed\{\}\.", r""),
    (r"", r"The answer format must be: \\boxed\{+'The final answer goes here\.'\}+"),
]
_WRAPPED = [(re.compile(before, re.DOTALL), re.compile(rf"(?:{behind})\Z")) for before, behind in _WRAPPERS]
_MOST_WRAPPERS = 8  # around each other


def bare_problem(prompt: str) -> str:
    """Return the problem without the instructions that a known data set put around it."""
    text = prompt.strip()
    for _ in range(_MOST_WRAPPERS):
        for before, behind in _WRAPPED:
            opening = before.match(text)
            if not opening or not (closing := behind.search(text, opening.end())):
                continue
            if (body := text[opening.end() : closing.start()].strip()) and body != text:
                text = body
                break
        else:
            break
    return text


def without_tool(prompt: str) -> str:
    """Return a prompt with the instructions of the protocol text in place of those for a tool; others stay."""
    text, problem = prompt.strip(), bare_problem(prompt)
    if problem == text:
        return prompt
    names = [name for name, form in PROMPTS.items() if form.format(problem=problem) == text]
    is_short = any(name.endswith("_short") for name in names)
    return PROMPTS["text_short" if is_short else "text"].format(problem=problem)
