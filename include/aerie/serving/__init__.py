"""The verifier's server: its plan, its launch, the keeper that parents it, and how other parts reach it.

``plan``, ``memory``, ``errors``, ``lease``, ``probe`` and ``client`` import neither torch nor SGLang: every environment
uses them. ``keeper`` runs in the serve environment.
"""
