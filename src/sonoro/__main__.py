"""`python -m sonoro` is `sonoro`."""

from sonoro.cli.main import main

main()
