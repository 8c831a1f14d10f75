"""What the router tells of itself: counters, Prometheus text, the access log, request ids, rows of metrics."""
