"""Diagnoses of an installation: what runs here, and whether it computes the right numbers."""
