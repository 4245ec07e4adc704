"""Random graphs, plans, samples and assignments, and the cases that they make up: for the master test (`gradient_cases.py`), for
work inside waits (`inside_cases.py`) and for experts (`expert_cases.py`).
"""
