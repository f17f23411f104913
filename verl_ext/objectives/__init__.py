"""What a step maximises, in plain torch: these files import nothing of verl, so that any harness can call them.

`ppo.py`, `olmorl.py`, `icepop.py`, `icepop_onpolicy.py`, `glm5_async.py`, `mis.py`, `gspo.py`, `sapo.py`, `cispo.py`,
`dppo.py`, `gmpo.py` have the objective of a token; `group_mean.py`, `maxrl.py`, `tir_otb.py` have advantages;
`grpo_roc.py` chooses rollouts; `mean.py` has the means, `terms.py` what they share, `shaping.py` parts of a reward.
In: log-probs, advantages and masks. Out: an objective per token, to be maximised; advantages; a loss.
verl gets them from `verl_ext/trainer/objective.py` and `verl_ext/trainer/advantages.py`. All: docs/guides/objectives.md
"""
