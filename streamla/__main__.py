"""`python -m streamla` is `streamla`."""

from streamla.cli import main

main()
