"""Process groups, and the messages and collectives over them."""
