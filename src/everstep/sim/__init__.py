"""The production driver under virtual time: its journal, commits, repair and take-over, over a simulated
store and simulated agents.

``time`` has the clock and the event loops, ``disk`` the store and its faults, ``hosts`` the agents, ``rules``
what must hold, ``schedule`` what is done to a run, ``mistakes`` what must be found.
"""
