"""Starting the services of a run on one machine, watching them, and ending them together.

Imports no service: they are started as processes of their own, `python -m furlong NAME`.
"""
