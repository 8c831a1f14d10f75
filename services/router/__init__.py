"""The router: which engine takes a request, and the pass-through that carries it there and back.

`workers.py` decides (no I/O), `upstream.py` and `connections.py` speak HTTP to workers, `proxy.py` carries requests,
`control.py` and `grpc_service.py` are the control surfaces, `front.py` tells their paths apart, `main.py` is the
process.
"""
