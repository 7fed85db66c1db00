"""What any process of ours knows of itself: what the kernel offers, its session, where its time goes, and
what GPUs are used for.
"""
