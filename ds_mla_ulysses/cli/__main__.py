"""`python -m ds_mla_ulysses.cli` is the command `ds-mla-ulysses`."""

from . import main

main()
