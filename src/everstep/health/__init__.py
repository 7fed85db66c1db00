"""How workers do: judgments over observations, and nothing else. Pure, as the controller is."""
