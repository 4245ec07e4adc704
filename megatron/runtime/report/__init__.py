"""What a run tells of itself: lines, logs, pictures and measured timelines."""
