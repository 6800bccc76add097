"""Makes the demo's tiny reasoning verifier and its sample sources; see the README beside this file."""
