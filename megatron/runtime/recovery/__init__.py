"""Processes of elastic runs come and go: their supervisors, the keeper of the list of nodes, and ranks that leave and join."""
