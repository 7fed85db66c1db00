"""Hosts that are nodes of a Ray cluster. Ray core only: actors, placement groups, node, drain and job state.

All messages to and from agents use Ray's own calls: no port of ours is opened.
"""
