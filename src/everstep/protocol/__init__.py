"""What driver, agents, templates and workers share: their messages (``wire``, ``worker_messages`` and the
like), how these travel (``framing``) and how metrics are encoded in them; the memory in which a worker counts
its progress for its agent (``progress``); and how a worker's stacks are read (``stacks``).
"""
