"""Process groups, and messages and collectives over them: what moves between ranks."""
