"""A router of several processes, for more requests than one core can carry.

The first process, the primary, owns the registry, probes, state file, control surface and gRPC, and takes all
connections; it and its children, the secondaries, pass requests on. Each of them chooses workers by itself, from a
registry that the primary keeps the same everywhere and from counts in memory that all of them share.
"""
