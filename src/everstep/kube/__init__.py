"""The operator: a pure reconcile, and the hands around it."""
