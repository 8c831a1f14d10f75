"""Where rows go. One file a sink; only wandb_process.py imports wandb."""
