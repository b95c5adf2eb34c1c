"""The op families, one folder each. Other packages import only a family's `api`."""
