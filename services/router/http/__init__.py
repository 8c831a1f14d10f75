"""HTTP itself: clients' connections, workers' connections, and one request's way from one to the other."""
