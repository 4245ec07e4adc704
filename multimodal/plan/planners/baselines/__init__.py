"""Planners of the systems and strawmen that papers compare theirs with."""
