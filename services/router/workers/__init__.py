"""The workers: who they are, whether they may take requests, and which one takes the next."""
