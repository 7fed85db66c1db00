"""The operator: a pure reconcile, and what carries out its actions."""
