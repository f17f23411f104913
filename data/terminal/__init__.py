"""Terminal tasks that are generated: templates of twelve kinds, with solutions and tests.

template.py has what all share, `Draw` and `Made`, and turns what a template made into a task. Each other module is one
kind, and each of its functions with `@template` one template: it draws names and numbers, computes what must come out
in Python, and gives the commands of a reference solution. check.py is the test program of every task; traces.py runs
the solutions for SFT.
"""
