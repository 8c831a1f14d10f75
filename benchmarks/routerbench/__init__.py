"""What `benchmarks/router.py` and `benchmarks/router_behaviour.py` are made of."""
