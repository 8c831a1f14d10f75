"""HTTP of the metrics service: taking records in, asking, live events, probes. Each idea in a file."""
