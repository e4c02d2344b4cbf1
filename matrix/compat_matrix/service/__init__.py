"""The matrix as a web service: pages, an API, and the execution of submitted runs."""
