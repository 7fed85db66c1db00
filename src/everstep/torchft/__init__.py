"""Everything for torchft: its backend, and its lighthouse, a process that some host of the run has.

Agents and the driver know it as something that a backend needs beside its workers.
"""
