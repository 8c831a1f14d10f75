"""The router's own face: what clients and the rollout service call to steer it, over HTTP and gRPC."""
