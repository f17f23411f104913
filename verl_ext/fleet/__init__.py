"""The rollout servers as one fleet: which server a request goes to, and what happens to it when weights change, a
server dies, or one is added or removed.

`weight_update.py` is the key `retool.fleet.weight_update`: its modes, their requirements, and the hook into verl.
`server.py` is verl's vLLM server and replica with these modes, `boundaries.py` tells which weights wrote which token.
`health.py` is the key `retool.fleet.health` and decides which server is dead. `recovery.py` sends the heartbeats and
replaces dead servers; `watched.py`, verl's server, returns their requests, and `client.py` continues them.
`transfer.py` is a weight update that does not wait for dead servers. `modes.py` decides which runs can have all this.
`balancer.py` is the key `retool.fleet.routing`, `routing.py` its policy, `ranks.py` a request for a rank of a server.
`members.py` adds and removes servers of a run in progress, on commands that `__main__.py` sends by `commands.py`.
`replicas.py` starts and stops a server.
In: a run's config, requests, commands. Out: `version_runs` of every request, which verl_ext/rollout turns into spans.
"""
