"""What is behind the functions that a training function calls: one session in each worker process.

How a worker is started, watched and ended is ``agent``'s. What users call is in ``training``.
"""
