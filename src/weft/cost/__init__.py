"""Costs of a step, in named terms: from a hardware sheet, measured tables or weft's own profile."""
