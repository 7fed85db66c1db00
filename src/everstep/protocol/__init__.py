"""What driver, agents, templates and workers say to each other, and how it travels."""
