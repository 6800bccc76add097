"""From validated data sets to one training set and a draft vocabulary."""
