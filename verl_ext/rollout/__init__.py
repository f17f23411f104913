"""A rollout: the model writes, a tool answers, the model continues.

`base.py` has what every agent loop shares; in `loop.py` the model plays by itself, in `agents.py` an agent asks it by
the gateway. `starters.py` starts agents, `outside.py` hands tasks to those that come from outside, and `agent_turns.py`
makes the turns of the records.
`encoded_prompts.py` has its prompts, `response.py` what it keeps of a response, `sampled.py` reads what a server sent;
`scored.py` adds the reward, and `rows.py` writes the episode as verl's rows. `workers.py` runs many; `group_reports.py`
reports them to the recorder, which `recorder_actor.py` starts. `reward_manager.py` is verl's door to the reward.
`client.py` asks verl's servers; `servers.py` are those of commands outside of a run, for which `standalone.py` makes
loop and tokenizer; `scripted.py` rolls out without a model or a sandbox.
`tool_use.py` counts what a rollout did with tools, `stops.py` says where the engine stops within a turn, `log_probs.py`
checks what the server sends, `seeds.py` makes the seed of a request, `weight_versions.py` says which weights wrote a
token, `weight_sockets.py` keeps the weights of two runs apart on their way to a server.
`liveness.py` checks that the workers are alive, `logs.py` shows their warnings.
In: a prompt, verl's server. Out: an `Episode`: turns, token ids, mask, log-probs, the end and its fault, the reward.
"""
