"""`python -m sonoro` is `sonoro`."""

from sonoro.cli import main

main()
