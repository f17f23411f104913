"""What an episode acts in: tools that it can call, worlds that reply, and who is at fault if a call fails.

`toolbox.py` runs a call: code in the sandbox by `interpreter.py`, or by `notebook.py`, which remembers; other tools by
verl's interface. `tool_errors.py` is for authors of tools, and `threads.py` runs those that are no coroutines.
`python.py` is the sandbox as a verl tool, and `shared_client.py` the one sandbox client of a process. `base.py` is the
interface, `by_name.py` makes environments by their names, which stand below: `search.py` looks up a local `corpus.py`,
`math_tools.py` runs `math_program.py` in the sandbox, `user.py` lets a language model play the user, `mcp_tools.py` has
the tools of a server that `mcp_connection.py` starts, and `terminal.py` works in a box of the sandbox, whose files
`edit_program.py` edits. `repository.py` derives from it.
`skyrl_gym.py` and `openenv.py` adapt environments of other projects, whose rewards `rewards.py` turns into scores.
In: a call. Out: text for the model, or an infrastructure failure.
"""

BUILT_IN: dict[str, str] = {
    "math_tools": "verl_ext.environments.math_tools:MathTools",
    "mcp": "verl_ext.environments.mcp_tools:Mcp",
    "openenv": "verl_ext.environments.openenv:OpenEnv",
    "repository": "verl_ext.environments.repository:Repository",
    "search": "verl_ext.environments.search:Search",
    "skyrl_gym": "verl_ext.environments.skyrl_gym:SkyRlGym",
    "terminal": "verl_ext.environments.terminal:Terminal",
    "user": "verl_ext.environments.user:User",
}
IN_BOXES = ("repository", "terminal")  # each of their episodes has a box of the sandbox
OF_SANDBOX = ("python", "notebook")  # both are ToolEnvironment, with one interpreter or the other
