"""Everything for torchft: its backend, and its lighthouse, a process that some host of the run has.

For agents and the driver, the lighthouse is something that a backend needs beside its workers.
"""
