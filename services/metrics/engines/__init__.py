"""Numbers of the engines: read from SGLang's log lines and from Prometheus endpoints, one row an interval."""
