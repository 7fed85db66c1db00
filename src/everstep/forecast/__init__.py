"""What will my goodput be? The brain of production on a modelled cluster, for weeks of virtual time."""
