"""Closed forms of a plan's layouts, seconds, bytes and bounds, by which planners prune before they simulate."""
