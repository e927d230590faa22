"""A second reading of names, formulas and scales, independent of the planner's tables."""
