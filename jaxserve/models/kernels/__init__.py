"""Products by other hands than XLA's, each with a twin in XLA that takes its place where it is not there."""
