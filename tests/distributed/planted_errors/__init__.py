"""Errors planted into a rank's step: each is something that a wrong runtime could do, and that the master test must see.

`in_any_plan.py` has those that can be met whatever the plan, `in_some_plans.py` the others.
"""
