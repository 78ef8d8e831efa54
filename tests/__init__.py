"""The tests of nbaccel: folders mirror the package; `house/` watches the house itself."""
