"""Follows the log files that other programs write: each line becomes one record, once."""
