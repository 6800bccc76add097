"""From conversations to prompt ids, through the verifier's own chat template."""
