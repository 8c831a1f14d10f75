"""Furlong's services: one package a process. None imports another; they meet over the wire."""
