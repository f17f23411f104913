"""The servers that rollouts come from, as one fleet: which one a request goes to, and what becomes of it when weights
change, a server dies, or one comes or goes.

`weight_update.py` is the key `retool.fleet.weight_update`: its modes, what refuses them, and where verl is told.
`server.py` is verl's vLLM server and replica with these modes, `boundaries.py` which weights wrote which token there.
`health.py` is the key `retool.fleet.health`: which server is dead. `recovery.py` asks them and replaces the dead; their
requests come back by `watched.py`, verl's server, and go on by `client.py`. `transfer.py` is an update of the weights
that waits for none that is dead. `modes.py`: which runs can have it.
`balancer.py` is the key `retool.fleet.routing`, `routing.py` its policy, `ranks.py` a request for a rank of a server.
`members.py` adds and removes servers of a run that goes on, `commands.py` and `__main__.py` are how it is told to.
`replicas.py` starts and stops a server.
In: a run's config, requests, commands. Out: `version_runs` of every request, which verl_ext/rollout makes spans of.
"""
