"""A photograph resized, warped and filtered by rudnn, beside the same by torch."""
