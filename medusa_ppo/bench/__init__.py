"""Performance claims: always ratios within one run, against what a user would otherwise pick."""
