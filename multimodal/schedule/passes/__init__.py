"""Passes: functions from one schedule to another, one file each."""
