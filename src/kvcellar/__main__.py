"""``python -m kvcellar``: the command line."""

from kvcellar.cli import main

main()
