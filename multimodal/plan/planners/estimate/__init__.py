"""Properties of a plan in closed form: layouts, seconds, bytes and bounds, by which planners prune before they simulate."""
