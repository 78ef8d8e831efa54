"""In Ray's own processes only: in the place of a package that they import and have no use for.

It checks runtime environments, which actors of nbaccel have not. Its import takes long in each
process, and seconds where Jupyter has brought rfc3987_syntax along, which it imports
(python-jsonschema/jsonschema#1428).
"""
