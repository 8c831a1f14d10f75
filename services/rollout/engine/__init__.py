"""The CPU generation engine: one process that speaks SGLang's HTTP API over its own forward pass."""
