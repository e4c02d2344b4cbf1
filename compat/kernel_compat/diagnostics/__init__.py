"""Diagnoses of an environment: the numbers that its kernels compute, and its broken installs."""
