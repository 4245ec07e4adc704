"""Choices among assignments and schedules by the steps that they are predicted to take."""
