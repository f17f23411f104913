"""One page on a run, or on several: `retool report --run RUN`.

`contents.py` reads what a run left. `page.py` puts the page together, `comparison.py` the page of several runs,
`verdict.py` says what improved and what did not, `rollouts.py` chooses the rollouts that are shown.
`verl_ext/pages/` makes pages of the templates.
In: a run's folder. Out: report.html, summary.json.
"""
