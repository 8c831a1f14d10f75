"""Asking a metrics service, or the store that one has left: filters, queries, and a client. Reads only.

Part of the library, so that the command line and notebooks can read a run whose service is gone.
"""
