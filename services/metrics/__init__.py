"""The metrics service: every record made durable, reduced to rows, handed to sinks."""
