"""What a rollout can call, and who is at fault if a call fails.

`toolbox.py` runs a call: code by `interpreter.py` in the sandbox, other tools by verl's interface. `tool_errors.py` is
for authors of tools. `python.py` is the sandbox as a verl tool, `shared_client.py` the one sandbox client of a process.
In: a call. Out: text for the model, or an infrastructure failure.
"""
