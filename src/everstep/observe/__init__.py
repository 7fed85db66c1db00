"""What reads a run from outside, and never writes to it: its journal's read model, the page, the server of
the page. Two exceptions ask something of a run, as the command line does: ``actions``.
"""
