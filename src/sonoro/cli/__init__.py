"""The command line: one module a command; `start.main` is the entry point."""
