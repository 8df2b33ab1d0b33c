"""What a step costs: named terms from a hardware sheet, measured tables or weft's own profile."""
