"""The router: which engine takes a request, and the proxy in front of the engines."""
