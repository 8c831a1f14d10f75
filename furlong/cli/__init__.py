"""The command `furlong`: one module a command. Starts fast: nothing heavy is imported before it is needed."""
