"""Choices among assignments and schedules by predicted steps."""
