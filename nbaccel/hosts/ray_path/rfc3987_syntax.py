"""In Ray's own processes only: in the place of a package that they have no use for.

Each of them imports jsonschema, which imports that where Jupyter has brought it along. It takes
long, longest in a process with torch (python-jsonschema/jsonschema#1428).
"""

raise ModuleNotFoundError(f"Ray's processes do without {__name__}", name=__name__)
