"""What people install, each with a stack of its own: the demo of a newcomer, and a GPU host over the network."""
