"""A plugin of ms-swift: ``--external_plugins $(python -m kernel_compat_run.plugins.ms_swift)``.

Its file is in a folder of its own, because ms-swift puts that folder first in ``sys.path``.
"""
