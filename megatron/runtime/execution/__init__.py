"""Builds the resources that a rank needs to run steps, and runs its lane of a schedule, action by action."""
