"""Where an agent listens: names in its folder, for those who connect and need nothing else of an agent."""

SOCKET = "agent.sock"
"""Its driver's commands."""
PEER_SOCKET = "peers.sock"
"""Where other agents ask."""
RELAY_SOCKET = "relay.sock"
"""Where it asks others that it can't reach itself."""
