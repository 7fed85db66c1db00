"""Hosts that are nodes of a Ray cluster. Ray core only: actors, placement groups, node, drain and job state.

Every word to and from an agent goes over Ray's own calls: no port of ours is opened.
"""
