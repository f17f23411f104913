"""What a step maximises.

`shaping.py` has the optional parts of a reward.
In: numbers of responses. Out: numbers of responses.
"""
