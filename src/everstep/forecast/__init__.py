"""What will my goodput be? The controller of real runs on a modelled cluster, for weeks of virtual time.

``question`` and ``presets`` have what can be asked, ``forecast`` simulates it, ``answer`` has the result and
what would improve it, ``plot`` draws it. No driver, agent or storage takes part: ``everstep.sim`` has those.
"""
