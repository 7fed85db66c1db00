"""What people and programs see of a run: terminal, callbacks, trackers, metrics, the page. Live, or from its
journal.

Nothing here decides anything, or writes to a run's storage, but for two requests, as the command line makes
them (``actions``): that a run stops, or that a part of it dies.
"""
