"""Diagnoses of an environment: attention names, the numbers that kernels compute, and broken installs."""
