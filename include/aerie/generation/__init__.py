"""Responses for the prompts of a data set: never lost, never twice, within the budget."""
