"""When each action runs: builders emit schedules, passes rewrite them, one validator checks them."""
