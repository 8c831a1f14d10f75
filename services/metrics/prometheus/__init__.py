"""GET /metrics: the newest values of every run, and how the service is, for Prometheus to scrape."""
