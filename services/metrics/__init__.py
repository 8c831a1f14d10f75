"""The metrics service: takes in every log line and number of a run, durably, and hands rows to the sinks."""
