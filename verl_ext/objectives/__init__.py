"""What a step maximises, as far as it is ours: verl/trainer/ppo/core_algos.py has the loss and the advantages.

`shaping.py` has the optional parts of a reward.
In: numbers of responses. Out: numbers of responses.
"""
