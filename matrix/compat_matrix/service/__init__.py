"""The matrix on the network: a page, an API that answers, and a queue from which workers take cells."""
