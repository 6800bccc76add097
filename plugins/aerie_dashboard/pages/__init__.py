"""The pages, by subject. Each asks the store, decides what is shown, and leaves how to a template."""
