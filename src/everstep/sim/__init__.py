"""The production driver under virtual time, over a simulated store and simulated hosts.

``time`` has the clock and the event loops, ``disk`` the store, ``cluster``, ``agents``, ``workers`` and
``memory`` the hosts, ``engine`` and ``seats`` what a driver has of them, ``scenario``, ``faults`` and
``storage_faults`` what is done to a run, ``invariants`` and ``rules`` what must hold, ``schedule`` all of it
together. ``hunt`` runs many schedules, ``shrink`` shortens one that fails, ``coverage`` says which fault
leads where, and ``mistakes`` has what must be found.
"""
