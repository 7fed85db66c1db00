"""The journal: the one record of a run, and what is read back from it.

Only a driver writes. What people see of a run is made from it in ``observe``.
"""
