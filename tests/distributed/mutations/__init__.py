"""Single mutations of a run that works; `table.py` lists them, and each topic has a file of its own.

Whatever a mutation does, a run must either refuse it (every rank ends by itself, with one message that names the place and the
fix) or train as one process trains with the same inputs. `judge.py` says which of the two happened, or what is wrong.
"""
