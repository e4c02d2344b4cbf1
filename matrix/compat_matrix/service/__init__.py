"""The matrix as a web service: pages, an API, and a queue of cells for workers."""
