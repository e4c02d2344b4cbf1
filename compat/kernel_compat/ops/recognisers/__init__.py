"""What a module computes, proven by calling it with a few inputs."""
