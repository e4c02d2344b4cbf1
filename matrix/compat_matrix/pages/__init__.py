"""The pages: one set of view models, templates and styles for the files of `report` and for the service."""
