"""Magics, forms and hints in a notebook."""
