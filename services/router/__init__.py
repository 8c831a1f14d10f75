"""The router: which engine takes a request, and the pass-through that carries it there and back.

`workers/` decides (no I/O), `http/` carries requests, `control/` is its own face over HTTP and gRPC, `watch/` tells of
it, `processes/` are more than one of it, `router.py` is the whole without servers, `main.py` the process.
"""
