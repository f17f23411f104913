"""The text of a tool call and of its result, shared by SFT and RL.

`base.py` has what every protocol does, `code.py` calls between <code> and </code>, `hermes.py` calls in JSON,
`by_name.py` chooses one. `thinking.py` says which part of a turn is thinking, in which nothing is a call. `trace.py`
turns a conversation into the segments of a rollout.
In: text of the model, results of tools. Out: calls, and the tokens that follow them.
"""
