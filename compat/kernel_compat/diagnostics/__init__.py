"""Diagnoses of an environment: the numbers that its kernels compute."""
