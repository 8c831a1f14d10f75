"""Furlong's library: what every service, and every user's hook, imports.

Imports no service, no torch and no vendor at import time.
"""

__version__ = "0.1.0"
