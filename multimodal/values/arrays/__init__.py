"""Values of a whole step as flat arrays: what is placed, routed and numbered by the ten thousand."""
