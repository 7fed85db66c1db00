"""All mistakes that the simulator must find, by name: ``everstep sim-check --plant NAME``."""

from __future__ import annotations

from everstep.sim import controller_mistakes, driver_mistakes

MISTAKES = {mistake.name: mistake for mistake in (*controller_mistakes.MISTAKES, *driver_mistakes.MISTAKES)}
