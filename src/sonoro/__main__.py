"""`python -m sonoro` is `sonoro`."""

from sonoro.cli.start import main

main()
