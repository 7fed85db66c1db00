"""What tests and people on a laptop use: virtual hosts that can be broken."""

from everstep.engine.local.cluster import LocalCluster as LocalCluster

__all__ = ["LocalCluster"]
