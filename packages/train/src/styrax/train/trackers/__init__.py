"""Trackers beside metrics.jsonl, by the names that ``train.trackers`` takes."""
