"""A rollout: the model writes, a tool answers, the model continues.

`loop.py` is the agent loop of one rollout, `response.py` what it keeps of a response, `workers.py` runs many,
`tool_use.py` counts what a rollout did with tools. `stops.py` says where the engine stops within a turn.
`log_probs.py` checks what the server sends, `seeds.py` makes the seed of a request, `scripted.py` rolls out without a
model or a sandbox. `weight_versions.py` says which weights wrote which token, `weight_sockets.py` keeps the weights of
two runs apart on their way to a server.
`liveness.py` checks that the workers are alive, `logs.py` shows their warnings.
In: a prompt, verl's server. Out: token ids, loss mask, log-probs, the reason why the rollout ended.
"""
