"""Errors planted into a rank's step: each is something that a wrong runtime could do, and that the master test must see.

`run_with_error.py` runs a step with one of them; the other files hold them by the plan that can meet them.
"""
